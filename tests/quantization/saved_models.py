"""Quantized weights and models of every kind that can be saved, for tests of what lies in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backend.config import QuantizationSettings
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource, resolve_source
from backend.quantization.base import PackedWeight
from backend.quantization.calibration import cut_windows
from backend.quantization.formats.compressed_tensors import scheme_of
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.methods import make_method
from backend.quantization.quantize_model import SavedMethod, grid_settings, quantize_model
from backend.quantization.work_folder import WorkFolder
from tests.helpers import make_tiny_model

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
WINDOWS = cut_windows(IDS, 2, 16, 0)

INT4 = ("int4", {"bits": 4, "group_size": 32, "zero_point": "integer"})
KINDS: list[tuple[SavedMethod, dict[str, Any]]] = [
    INT4,  # type: ignore[list-item]
    ("int4", {"bits": 4, "group_size": 32, "zero_point": "none"}),
    ("int4", {"bits": 3, "group_size": 32, "zero_point": "integer"}),
    ("int4", {"bits": 5, "group_size": -1, "zero_point": "none"}),
    ("int8", {}),
    ("w8a8_int8", {}),
    ("fp8", {}),
]
CALIBRATED: list[tuple[SavedMethod, dict[str, Any]]] = [
    (method, {"bits": 4, "group_size": 32, "zero_point": zero_point})
    for method in ("gptq", "awq")
    for zero_point in ("integer", "none")
]
# The schemes that these come to, and those that a method has as a model is loaded.
SCHEMES = [*KINDS[:-1], ("fp8", {"granularity": "channel"}), ("fp8", {"granularity": "tensor"})]


def make_model(folder: Path, architecture: str = "Llama", **changes: Any) -> Path:
    """Of layers with 64 and 160 inputs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_model(folder, architecture, hidden_size=64, intermediate_size=160, **heads, **changes)


def save(folder: Path, output: Path, method: SavedMethod, **options: Any) -> Path:
    source = ModelSource(str(folder), "folder", path=folder)
    quantize_model(
        source, method, grid_settings(method, **options), WINDOWS, WorkFolder(output, force=False), device=CPU
    )
    return output


def load(folder: Path, **settings: Any) -> LoadedModel:
    quantization = QuantizationSettings.from_dict(settings)
    return load_model(resolve_source(str(folder)), device=CPU, dtype=torch.float32, quantization=quantization)


def packed_layers(loaded: LoadedModel) -> dict[str, PackedWeight]:
    return {path: each.packed for path, each in loaded.model.named_modules() if isinstance(each, QuantizedLinear)}


def quantized(method: str, options: dict[str, Any]) -> tuple[PackedWeight, StoredScheme]:
    """A weight of 30 rows and 64 columns."""
    weight = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)) * 0.05 + 0.01
    settings = QuantizationSettings.from_dict({"method": method} | options)
    made = make_method(settings)
    assert made is not None
    return made.quantize(weight), scheme_of(settings)


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
