"""What a run was made of: settings, model, machine, and text that repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components.settings_text import cli_command, toml_document
from app.services import Services
from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.experiments.compare import flatten
from backend.workload.spec import Workload
from db.run_rows import Run

_SHORT_TABLE = 10  # rows that are shown without scrolling


def show(services: Services, run: Run) -> None:
    st.markdown("**The same run from the command line**")
    try:
        command = cli_command(EngineConfig.from_dict(run.config), Workload.from_dict(run.workload), run.label)
        st.code(command, language="bash", wrap_lines=True)
    except ServeLabError as error:  # stored by a version that knew other settings
        st.info(f"This version cannot repeat the run: {error}")
    with st.grid(2, min_column_width=340):
        with st.container():
            st.markdown("**Config, as asked**")
            st.code(toml_document(run.config), language="toml")
        with st.container():
            st.markdown("**Workload**")
            st.code(toml_document(run.workload), language="toml")
        for title, data in {
            "Config, as run": run.resolved_config,
            "Loaded": run.load,
            "Environment": run.environment,
            "Cache at the start": run.cache_state,
        }.items():
            if data:
                with st.container():
                    st.markdown(f"**{title}**")
                    _table(data)


def _table(data: Mapping[str, Any]) -> None:
    rows = [{"": key, "value": _text(key, value)} for key, value in flatten(data).items()]
    st.dataframe(
        pd.DataFrame(rows), hide_index=True, lazy=False, height="content" if len(rows) <= _SHORT_TABLE else 360
    )


def _text(key: str, value: Any) -> str:
    if value is None:
        return formatting.NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("bytes"):
        return f"{formatting.memory(value)} ({formatting.count(value)})"
    if isinstance(value, int):
        return formatting.count(value)
    return formatting.number(value) if isinstance(value, float) else str(value)
