"""A folder's safetensors files as one set of named, memory-mapped tensors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.errors import ModelError
from backend.models.safetensors_file import find_parts

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Checkpoint:
    """Names, shapes and tensors of a model folder's safetensors file, or of the parts its index names.

    Use it as a context: the files stay mapped, and are read from the disk as their tensors are copied.
    """

    def __init__(self, folder: Path) -> None:
        """Open and check all files. Raises `ModelError` naming the file that is missing, truncated or foreign."""
        self.folder = folder
        self._files = ExitStack()
        self._locations: dict[str, tuple[Path, Any]] = {}  # tensor name -> (file, its safe_open handle)
        try:
            for path, expected in find_parts(folder).items():
                handle = self._open(path)
                present = set(handle.keys())
                if absent := sorted(expected - present):
                    raise ModelError(f"{path}: lacks {absent[0]}, which its index says it holds")
                self._locations |= dict.fromkeys(expected or present, (path, handle))
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    @property
    def names(self) -> list[str]:
        return sorted(self._locations)

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._locations[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The stored dtype as torch names it. Raises `ModelError` for those that are not plain floats."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ModelError(
                f"{self.path(name)}: {name} has dtype {stored}, which is not supported; supported: {', '.join(_DTYPES)}"
            )
        return _DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file: nothing is read before it is copied. Read only."""
        return self._locations[name][1].get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._locations[name][1].get_slice(name)

    def _open(self, path: Path) -> Any:
        try:
            return self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing, though the index names it") from None
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: truncated, or not a safetensors file ({error})") from None
