"""Predicted beside allocated: what the closed forms say of a stored run, and what its engine took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import links, notes
from app.components.sizing_models import sized_model
from app.services import Services
from backend.analysis.kv_size import kv_size
from backend.analysis.parameters import read_weights
from backend.errors import ModelError
from db.run_rows import Run

_MAX_SEARCHED = 100


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure of a run as predicted and as allocated, in bytes."""

    name: str
    predicted: int
    allocated: int

    @property
    def difference(self) -> float:
        """Allocated relative to predicted."""
        return self.allocated / self.predicted - 1


def show(services: Services, model: str) -> None:
    """Of the newest run of `model`, or else of any."""
    st.subheader("Predicted beside allocated", anchor=False)
    run = _newest(services, model)
    if run is None:
        st.info(
            "No run has loaded a model here yet. After one, its allocation stands beside the prediction.",
            icon=":material/compare:",
        )
        links.run_link()
        return
    try:
        rows = predictions(run, sized_model(run.model).config)
    except (ModelError, ValueError) as error:
        st.info(notes.plain(f"Run {run.title} of {run.model} cannot be predicted: {error}."), icon=":material/compare:")
        return
    except KeyError as error:  # stored by a version that recorded less
        st.info(
            notes.plain(f"Run {run.title} cannot be predicted: its record has no {error}."), icon=":material/compare:"
        )
        return
    st.caption(notes.plain(_words(run, model)))
    table = [
        {
            "": row.name,
            "Predicted": f"{formatting.memory(row.predicted)} ({formatting.count(row.predicted)})",
            "Allocated": f"{formatting.memory(row.allocated)} ({formatting.count(row.allocated)})",
            "Difference": "none" if row.predicted == row.allocated else formatting.difference(row.difference),
        }
        for row in rows
    ]
    st.dataframe(pd.DataFrame(table), hide_index=True, lazy=False, height="content", key="sizing-allocated")
    links.detail_link(run.run_id)


def _words(run: Run, model: str) -> str:
    """Which run it is, and on what."""
    resolved, environment, load = run.resolved_config or {}, run.environment or {}, run.load or {}
    device = environment.get("gpu" if resolved["model"]["device"] == "cuda" else "cpu") or "a device not known"
    text = f"Run {run.title}: {run.model}, {resolved['model']['dtype']} on {device}, {formatting.count(load['num_blocks'])} "
    text += f"blocks of {resolved['cache']['block_size']} tokens and the null block."
    return text if run.model in _names(model) else f"No run of this model yet; the newest of another. {text}"


def predictions(run: Run, config: Mapping[str, Any]) -> list[Prediction]:
    """What the engine was to take for this run, from its model's config and its settings alone, and what it took.

    The number of blocks is the run's own: it depends on what else was on the device.

    Raises:
        ValueError: the run's dtypes cannot be predicted.
    """
    resolved, load = run.resolved_config or {}, run.load or {}
    dtype, kv_dtype = resolved["model"]["dtype"], resolved["cache"]["dtype"]
    kv = kv_size(config, dtype if kv_dtype == "auto" else kv_dtype)
    pool = (load["num_blocks"] + 1) * kv.blocks(resolved["cache"]["block_size"]).bytes_per_block
    rows = [
        Prediction("KV per token", kv.bytes_per_token, load["kv_bytes_per_token"]),
        Prediction("KV cache", pool, load["kv_cache_bytes"]),
    ]
    # Quantized weights are of layers, groups and scales of their method's own choice.
    if not load.get("num_quantized_layers"):
        rows.insert(0, Prediction("Weights", read_weights(config).num_bytes(dtype).total, load["weights_bytes"]))
    return rows


def _names(model: str) -> list[str]:
    """A preset is the model that is here when only the case of its name differs."""
    return [model, model.lower()]


def _newest(services: Services, model: str) -> Run | None:
    for models in (_names(model), None):
        for run in services.repository.list(models=models, kind="serve", limit=_MAX_SEARCHED):
            if run.resolved_config and {"kv_cache_bytes", "kv_bytes_per_token"} <= (run.load or {}).keys():
                return run
    return None
