"""Colours and what they mean: Okabe–Ito, readable on light and dark. A colour keeps its meaning on every page."""

from __future__ import annotations

from collections.abc import Sequence

PREFILL = "#0072B2"  # prompt tokens, input
DECODE = "#E69F00"  # generated tokens, output
IN_USE = "#009E73"  # requests that run, and the KV blocks they hold
CACHED = "#56B4E9"  # KV kept for reuse
FREE = "#C9CED6"
WAITING = "#8A94A3"
WEIGHTS = "#6B7280"
BASELINE = "#7F7F7F"
ERROR = "#D55E00"  # errors and preemptions only
RECOMPUTE = "#7B61C4"  # tokens run again after a preemption
SPANS = {  # what a request's time goes by with, see `backend.metrics.request_timeline`
    "queued": WAITING,
    "prefill": PREFILL,
    "decode": DECODE,
    "recompute": RECOMPUTE,
    "stalled": "#5B6472",
    "preempted": ERROR,
    "swapped": "#3FB8AF",
}
# Text in a table, dark enough on white and light enough on black.
VERDICTS = {
    "better": {"light": "#00704F", "dark": "#35C79A"},
    "worse": {"light": "#B8430A", "dark": "#FF8F5C"},
}

# Where a token comes from, under speculation.
ACCEPTED, RECOVERED, BONUS = "#009E73", "#CC79A7", "#56B4E9"

_RUNS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C7A00", "#D55E00")


def run_colours(run_ids: Sequence[int], baseline: int | None) -> dict[int, str]:
    """A colour per run that depends on its place in the list only; the baseline is grey."""
    colours = {run_id: _RUNS[place % len(_RUNS)] for place, run_id in enumerate(run_ids)}
    if baseline in colours:
        colours[baseline] = BASELINE
    return colours
