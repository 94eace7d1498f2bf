"""Reading GGUF files strictly: whatever is truncated, foreign or missing becomes one `ModelError` that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np

from backend.errors import ModelError

T = TypeVar("T")


class _BoundedReader(gguf.GGUFReader):
    """`GGUFReader` takes what lies past the end of the file for empty arrays, and so works through any damaged count."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        self._check_end(int(offset) + np.dtype(dtype).itemsize * int(count))
        return super()._get(offset, dtype, count, *args, **kwargs)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            start = orig_offs + 12  # behind the elements' type and number
            item_type = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
            numpy_type = self.gguf_scalar_to_np.get(item_type, np.uint64)  # strings and arrays begin with their length
            self._check_end(start + int(self._get(orig_offs + 4, np.uint64)[0]) * np.dtype(numpy_type).itemsize)
        return super()._get_field_parts(orig_offs, raw_type)

    def _check_end(self, end: int) -> None:
        if end > len(self.data):
            raise ValueError(f"{len(self.data):,} bytes, where at least {end:,} were expected")


class GGUFFile:
    """An open GGUF file: typed metadata and tensors.

    Attributes:
        path: where it lies.
        tensors: by name; data is memory-mapped, rows first, still quantized.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises `ModelError` if it is missing, foreign, truncated or one part of several."""
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, and b'GGUF' was expected")
            reader = _BoundedReader(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ModelError(f"{path} is a truncated or damaged GGUF file: {error}") from None
        if reader.byte_order != "I":
            raise ModelError(f"{path} has the other byte order than this machine's; convert it first")
        self._fields = reader.fields
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        parts = self.get("split.count", int, 1)
        if parts > 1:
            raise ModelError(f"{path} is one of {parts} parts; merge them into one file first")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value.

        Args:
            key: such as "llama.block_count".
            kind: str, bool, int, float or list; an int serves as a float.
            default: given back when the key is absent; without one the key must be there.

        Raises:
            ModelError: the key is absent, or its value is of another kind.
        """
        field = self._fields.get(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self.path} has no metadata {key!r}, which a Llama model's GGUF file must have")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise ModelError(f"{self.path}: metadata {key!r} is damaged: {error}") from None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: metadata {key!r} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        """A metadata list of strings. Raises `ModelError`."""
        values = self.get(key, list)
        if not all(type(value) is str for value in values):
            raise ModelError(f"{self.path}: metadata {key!r} is not a list of strings")
        return values

    def has(self, key: str) -> bool:
        return key in self._fields
