"""The safetensors container, as far as it is read and written without loading a tensor.

Layout: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}` whose offsets count from
the end of the header, then the tensors' bytes without gaps (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backend.errors import ModelError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# The first of which there is one; the later names are AutoGPTQ's.
_WEIGHTS = (WEIGHTS_FILE, WEIGHTS_INDEX, "gptq_model-*.safetensors.index.json", "gptq_model-*.safetensors")

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Float32Tensor:
    """One fp32 tensor to write: `rows()` yields its values in order, as pieces of any size."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[], Iterator[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.shape)


def write_float32(path: Path, tensors: Sequence[Float32Tensor], on_bytes: Callable[[int], None]) -> None:
    """Write `tensors` to `path` piece by piece and flush them to the disk.

    Args:
        path: file to create.
        tensors: names must differ; each `rows()` must yield exactly the values its shape says.
        on_bytes: called after each piece with the bytes of tensors written so far.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            expected = written + tensor.num_bytes
            for rows in tensor.rows():
                written += file.write(np.ascontiguousarray(rows, dtype="<f4").data)
                on_bytes(written)
            if written != expected:
                raise AssertionError(f"{tensor.name}: {written - expected:+d} bytes against its shape {tensor.shape}")
        file.flush()
        os.fsync(file.fileno())


def find_weights(folder: Path) -> Path | None:
    """The file of a model folder's weights, or the index of their parts."""
    for pattern in _WEIGHTS:
        found = [path for path in folder.glob(pattern) if path.is_file()]
        if len(found) == 1:
            return found[0]
    return None


def find_parts(folder: Path) -> dict[Path, set[str]]:
    """The files of a model folder's weights, each with the tensors to take from it; an empty set stands for all it holds.

    Raises:
        ModelError: there are no weights, or the index of their parts is malformed.
    """
    weights = find_weights(folder)
    if weights is None:
        found = sorted(path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
        suffix = f" (it holds {', '.join(found)}: only safetensors are supported)" if found else ""
        raise ModelError(f"{folder}: neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX} is there{suffix}")
    if weights.suffix != ".json":
        return {weights: set()}
    index = weights
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = {name: Path(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f'{index}: not a safetensors index; expected {{"weight_map": {{tensor: file}}}}') from None
    parts: dict[Path, set[str]] = {}
    for name, file in entries.items():
        if file.name != str(file):
            raise ModelError(f"{index}: {name} is said to be in {str(file)!r}, which is not a file of this folder")
        parts.setdefault(folder / file, set()).add(name)
    return parts


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """Of a safetensors file."""

    num_tensors: int
    num_elements: int  # values in all of them


def count_tensors(path: Path) -> TensorCounts:
    """By a safetensors file's header. Raises `ModelError` if it is foreign or truncated."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size):
                raise ValueError
            header = json.loads(file.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        num_elements = sum(math.prod(entry["shape"]) for entry in tensors)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path} is not a safetensors file") from None
    if size != end:
        raise ModelError(f"{path} is truncated or damaged: it has {size:,} bytes, and its header asks for {end:,}")
    return TensorCounts(len(tensors), num_elements)
