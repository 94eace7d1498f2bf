"""Runs of the quantization lab on tiny models, and what they say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from backend.experiments.quantization_config import QuantizationLabConfig
from backend.experiments.quantization_lab import run_lab
from backend.metrics.stats import Phase, RunEnd, RunStart
from backend.models.sources import resolve_source
from backend.quantization.calibration import cut_windows
from backend.quantization.quantize_model import SavedMethod, grid_settings, quantize_model
from backend.quantization.work_folder import WorkFolder

TOKENS = 300
# Of layers with 64 and 160 inputs.
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 64, "intermediate_size": 160}


class Sink:
    """Keeps what a lab says."""

    def __init__(self, on_phase: Callable[[Phase], None] = lambda phase: None) -> None:
        self.phases: list[Phase] = []
        self.start: RunStart | None = None
        self._then = on_phase

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase)
        self._then(phase)

    def on_run_start(self, start: RunStart) -> None:
        self.start = start

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *record: None


def run(variants: Sequence[str], sink: Sink | None = None, **settings: Any) -> tuple[RunEnd, list[dict[str, Any]]]:
    values = {"model": "dummy:tiny", "variants": list(variants), "max_tokens": TOKENS, "speed": False} | settings
    results: list[dict[str, Any]] = []
    cancel = settings.pop("cancel", threading.Event())
    values.pop("cancel", None)
    end = run_lab(QuantizationLabConfig.from_dict(values), sink or Sink(), results.append, cancel)  # type: ignore[arg-type]
    return end, results


def checkpoint(folder: Path, model: Path, method: SavedMethod = "int4", **options: Any) -> Path:
    """Of a model, in groups of 32 if not by channel."""
    grid = {"group_size": 32} if method == "int4" else {}
    settings = grid_settings(method, **(grid | options))
    windows = cut_windows(list(range(256)), 1, 32, 0)
    source = resolve_source(str(model))
    return quantize_model(
        source, method, settings, windows, WorkFolder(folder, force=False), device=torch.device("cpu")
    ).output
