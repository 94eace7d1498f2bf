"""A run beside which a run with or without speculation is missing: the same settings, put on the Run page's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from app.components import links, notes, widgets
from app.services import check_engine
from app.state import fill_form
from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.workload.spec import Workload
from db.run_rows import Run


def without_speculation(run: Run) -> None:
    """A button to the same run, decoded one token a step."""
    if _button("Set up the run without speculation", "speculation-plain", "without speculation."):
        _fill(run, "without speculation", {})


def with_speculation(run: Run) -> None:
    """A button to the same run, with who drafts best of what comes with the program."""
    drafter = "with the EAGLE head that comes for its model to draft, or n-grams where none does."
    if _button("Set up the run with speculation", "speculation-drafted", drafter):
        _fill(run, "with speculation", {}, _drafted)


def always_drafting(run: Run) -> None:
    """A button to the same run, with drafts in every step, whether they pay or not."""
    if _button("Set up the run with drafts in every step", "speculation-always", "and speculative.adaptive off."):
        _fill(run, "always drafting", {**run.config["speculative"], "adaptive": False})


def _button(name: str, key: str, how: str) -> bool:
    help_text = f"The Run page with this run's settings, {how} It starts when you say so."
    return st.button(name, icon=":material/play_arrow:", key=key, help=help_text)


def _fill(
    run: Run,
    label: str,
    speculative: Mapping[str, Any],
    changed: Callable[[EngineConfig], EngineConfig] = lambda config: config,
) -> None:
    """Args:
    speculative: in place of the run's own settings of that section.
    """
    try:
        config = changed(EngineConfig.from_dict({**run.config, "speculative": speculative}))
        widgets.fill(fill_form(config, Workload.from_dict(run.workload), label))
    except ServeLabError as error:  # stored by a version that knew other settings
        st.error(notes.plain(f"This version cannot repeat the run: {error}"), icon=":material/error:")
    else:  # a query of its own: that of this page is its tabs', which do not let it go
        st.switch_page(links.RUN, query_params={})


def _drafted(config: EngineConfig) -> EngineConfig:
    """With an EAGLE head where one comes for the model and the settings allow it, else n-grams, which every model has."""
    with_head = config.with_overrides({"speculative.method": "eagle"})
    try:
        check_engine(with_head)
    except ServeLabError:
        return config.with_overrides({"speculative.method": "ngram"})
    return with_head
