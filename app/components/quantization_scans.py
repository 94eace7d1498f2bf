"""What the Quantization page knows of its scans: runs that look into one variant of a run, and are shown with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app import formatting
from app.components import activity, notes
from app.components.quantization_form import start_scan
from app.services import Services
from backend.experiments.layer_error import ALL
from backend.experiments.quantization_config import QuantizationLabConfig, variant_name
from backend.experiments.quantization_results import wholes
from db.run_rows import Run

VIEW, VARIANT, BY = "view", "variant", "by"  # in the session and in the address
SENSITIVITY, RANGES = "Sensitivity", "Ranges"
BY_NAMES = {"kind": "Kind of layer", "layer": "One layer at a time"}

_VIEW_OF = {"sensitivity": SENSITIVITY, "ranges": RANGES}  # experiment -> where it is shown
_MAX_SEARCHED = 200


def find(services: Services, run: Run, **asked: Any) -> dict[str, list[Run]]:
    """The scans of the run's model on its texts, newest first, by variant.

    Args:
        asked: values of a scan's config.
    """
    defaults = QuantizationLabConfig().to_dict()  # for what another version did not store
    found: dict[str, list[Run]] = {}
    asked |= {name: (defaults | run.config)[name] for name in ("text", "calibration")}
    for scan in services.repository.list(kind="quantization", models={run.model}, limit=_MAX_SEARCHED):
        config = defaults | scan.config
        if all(config[name] == value for name, value in asked.items()):
            for variant in config["variants"]:
                found.setdefault(variant, []).append(scan)
    return found


def follow(part: Run) -> None:
    """Have the page, and its address, show what a run has scanned, if it is a scan, where the address says nothing else."""
    if part.config["experiment"] not in _VIEW_OF:
        return
    view, variant = _VIEW_OF[part.config["experiment"]], part.config["variants"][0]
    wanted = [(VIEW, view, view), (VARIANT, variant, variant_name(variant))]
    if view == SENSITIVITY:
        by = part.config.get("by", "kind")
        wanted.append((BY, by, BY_NAMES[by]))
    for name, value, shown in wanted:
        if name not in st.query_params:
            st.session_state[name], st.query_params[name] = value, shown


def variants_of(results: Sequence[Any], *, comparable: bool = False) -> dict[str, float]:
    """Variants of a run with quantized layers, and their KL.

    Args:
        comparable: those only whose layers can stand in the reference's place.
    """
    return {
        row["variant"]: row["kl_mean"] or 0.0
        for row in wholes(results)
        if row["num_layers"] and not (comparable and row["layers_problem"])
    }


def choose_variant(losses: Mapping[str, float], scanned: Mapping[str, object]) -> str:
    """A selectbox over variants, at first of the one that loses most of those that are scanned, or of all."""
    state, variants = st.session_state, list(losses)
    if state.get(VARIANT) not in variants and (VARIANT in state or VARIANT not in st.query_params):
        state[VARIANT] = max(variants, key=lambda variant: (variant in scanned, losses[variant]))
    chosen = st.selectbox("Variant", variants, format_func=variant_name, key=VARIANT, width=260, bind="query-params")
    return chosen or variants[0]


def button(services: Services, run: Run, name: str, help_text: str, **asked: Any) -> None:
    """What queues a scan, or puts it behind the run under way.

    Args:
        asked: values of the scan's config, where they are not the run's.
    """
    busy = activity.is_active(services.queue.live())
    st.button(
        f"Add {name.lower()} to queue" if busy else name,
        icon=":material/queue:" if busy else ":material/play_arrow:",
        key=f"quantization-{asked['experiment']}",
        help=help_text,
        on_click=start_scan,
        args=(services, run.config, asked),
    )


def newest_rows(services: Services, scans: Sequence[Run], variant: str) -> tuple[Run, list[Any]] | None:
    """The newest of a variant's scans that is whole, with the variant's and the reference's rows; else the newest with figures.

    Says what became of the newest if it is not whole, and of the one that is returned.
    """
    unfinished = None
    for scan in scans:
        rows = [row for row in services.repository.quantization_results(scan.run_id) if row["part"] is not None]
        parts = {row["part"] for row in rows if row["variant"] == variant}
        if scan.is_final and parts:
            if scan.config["experiment"] != "sensitivity" or ALL in parts:
                return scan, rows
            unfinished = unfinished or (scan, rows)
        if scan is scans[0]:
            _say_state(scan)
    if unfinished is not None and unfinished[0] is not scans[0]:
        _say_state(unfinished[0])
    return unfinished


def source_text(scan: Run, num_tokens: int) -> str:
    """What a picture is of, in a few words."""
    return f"Run {scan.title}, {formatting.count(num_tokens)} tokens. {formatting.timestamp(scan.created_at)}."


def _say_state(scan: Run) -> None:
    """Of one that has no figures, or not all."""
    if not scan.is_final:
        st.info(
            notes.plain(f"Run {scan.title} is to find it out. How far it is stands above."),
            icon=":material/hourglass_top:",
        )
        return
    if scan.status == "cancelled":
        st.caption(notes.plain(f"Run {scan.title} was cancelled."))
    notes.failure(scan.status, scan.error)
