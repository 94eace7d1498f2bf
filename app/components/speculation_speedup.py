"""What speculation was worth: predicted from the run's own rounds, and measured against a run without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import formatting
from app.components import figures, notes, palette, speculation_charts, speculation_setup
from app.components.bars import Share, share_bar
from app.components.speculation_pick import (
    WITH,
    asked_differently,
    differs_in_speculation_only,
    method_of,
    same_questions,
    settings_of,
    short_name,
)
from app.components.speculation_rows import CELLS
from app.components.speculation_source import Source
from app.services import Services
from backend.analysis.draft_rounds import rates_by_position
from backend.analysis.measured_speedup import MeasuredSpeedup, measure_speedup
from backend.experiments.compare import metric_value
from db.run_rows import Run

_KNOWN = "speculation-speedups"
_SELECT = "speculation-with-select"
_LEAST_SHARE = 0.995  # of the output out of rounds, from which on nothing is said of the rest


def show(services: Services, source: Source) -> None:
    run = source.run
    if not run.is_final:
        st.info("What speculation was worth is known once the run is over.", icon=":material/hourglass_empty:")
        return
    plain = _pick(services, run)
    if plain is None:
        _without_plain(run)
        return
    found = _measured(services, source, plain)
    if found is None:
        st.info(
            f"Runs #{run.run_id} and #{plain.run_id} have no steps that could be compared: those without tokens of prompts.",
            icon=":material/compare_arrows:",
        )
        return
    _figures(run, plain, found)
    st.markdown("\n".join(f"- {notes.plain(sentence)}" for sentence in sentences(run, plain, found)))
    if warning := _warning(services, source, plain):
        st.warning(notes.plain(warning), icon=":material/warning:")
    _time_of_a_round(found)
    if settings_of(run).get("tree"):
        st.caption("Which number of drafted tokens would have been best is worked out for chains, and not for trees.")
        return
    configured = settings_of(run).get("num_speculative_tokens")
    picture = speculation_charts.by_length(found.each, configured if isinstance(configured, int) else 0)
    st.vega_lite_chart(*picture, key="speculation-by-length")
    st.caption(
        "From the acceptance rates of the positions and the measured costs of a round; between a plain step and a step that "
        "verifies the run's drafts, a step's time is taken to grow evenly with its tokens. An estimate."
    )


def measured_ratio(run: Run, plain: Run, metric: str = "tpot_ms.mean") -> float | None:
    """How many times as fast the run was, by the time per output token."""
    ours, theirs = metric_value(run.summary, metric), metric_value(plain.summary, metric)
    return theirs / ours if ours and theirs else None


def sentences(run: Run, plain: Run, found: MeasuredSpeedup) -> list[str]:
    """The prediction step by step, what was measured, and what would have been best. Plain text."""
    times, measured = found.times, measured_ratio(run, plain)
    said = [
        f"A round: {found.rounds.arithmetic}. A plain step of as many requests takes the model "
        f"{formatting.quantity(times.plain_ms, 'ms')}."
    ]
    if found.share < _LEAST_SHARE:
        said.append(
            f"{formatting.percent(found.share)} of the output behind the first tokens came out of rounds and the rest one token "
            f"a step: 1 / ({found.share:.3f} / {found.rounds.speedup:.2f} + {1 - found.share:.3f}) = ×{found.predicted:.2f} "
            "in all."
        )
    if measured is not None:
        said.append(
            f"Measured: ×{measured:.2f} by the mean time per output token, which is "
            f"{formatting.percent(measured / found.predicted)} of what is predicted."
        )
        said.append(
            "For scheduling, text and records, besides the model, a step with rounds takes "
            f"{formatting.quantity(times.other_ms, 'ms')} and a plain one {formatting.quantity(times.plain_other_ms, 'ms')}."
        )
    if settings_of(run).get("tree"):
        return said
    best, configured = found.best, settings_of(run).get("num_speculative_tokens")
    if best.num_speculative_tokens == 0:
        said.append("Best would have been no speculation: every number of drafted tokens costs more than it brings.")
    elif best.num_speculative_tokens == configured:
        said.append(
            f"Of the numbers of drafted tokens up to {configured} the run's own is the best; more may be better still."
        )
    else:
        said.append(f"Best would have been k = {best.num_speculative_tokens}: {best.arithmetic}.")
    return said


def _pick(services: Services, run: Run) -> Run | None:
    """The run without speculation that the address names, by default the newest that differs in nothing else."""
    state = st.session_state
    others = {other.run_id: other for other in same_questions(services, run) if method_of(other) is None}
    alike = (run_id for run_id, other in others.items() if differs_in_speculation_only(run, other))
    asked = state.get(WITH)
    if asked is not None and asked not in others:
        text = f"Run #{asked} is no finished run of this workload and model without speculation."
        st.warning(notes.plain(text))
        asked = None
    shown = next(alike, None) if asked is None else asked
    if not others:
        state[WITH] = None
        return None
    state[_SELECT] = state[WITH] = shown
    st.selectbox(
        "Without speculation",
        list(others),
        index=None,
        format_func=lambda run_id: _plain_name(run, others[run_id]),
        key=_SELECT,
        placeholder="no run",
        on_change=_take,
        help="A run of the same model and workload that decoded one token a step.",
    )
    return None if shown is None else others[shown]


def _take() -> None:
    st.session_state[WITH] = st.session_state[_SELECT]


def _plain_name(run: Run, other: Run) -> str:
    return short_name(other) + ("" if differs_in_speculation_only(run, other) else ", other settings")


def _without_plain(run: Run) -> None:
    st.info(
        "What speculation was worth shows beside a run of the same workload and settings without it. There is none yet.",
        icon=":material/compare_arrows:",
    )
    speculation_setup.without_speculation(run)


def _figures(run: Run, plain: Run, found: MeasuredSpeedup) -> None:
    measured = measured_ratio(run, plain)
    throughput = measured_ratio(plain, run, "output_throughput_tok_s")
    with figures.row():
        figures.figure(
            "Predicted",
            f"×{formatting.number(found.predicted)}",
            "Tokens per time over those of plain decoding, from the measured acceptance length and the model's measured times of "
            "drafting, verifying and plain steps.",
            "estimate",
        )
        figures.figure(
            "Measured",
            formatting.NONE if measured is None else f"×{formatting.number(measured)}",
            "Mean time per output token of the run without speculation over that of this run.",
            None if throughput is None else f"output tok/s ×{formatting.number(throughput)}",
        )
        figures.figure(
            "Tokens of a round",
            formatting.number(found.rounds.mean_acceptance_length),
            "mean_acceptance_length",
            f"of {formatting.number(found.times.num_drafted)} drafted",
        )
        figures.figure(
            "Draft",
            f"{found.times.draft_cost:.3f} steps",
            "Drafting for a round, in plain steps of as many requests.",
            formatting.quantity(found.times.draft_ms, "ms"),
        )
        figures.figure(
            "Verify",
            f"{formatting.number(found.times.verify_cost)} steps",
            "Verifying a round, in plain steps of as many requests.",
            formatting.quantity(found.times.verify_ms, "ms"),
        )


def _time_of_a_round(found: MeasuredSpeedup) -> None:
    times = found.times
    parts = (
        ("draft", times.draft_ms, palette.DECODE),
        ("verify", times.verify_ms, CELLS["accepted"].colour),
        ("other", max(0.0, times.other_ms), palette.FREE),
    )
    shares = [Share(name, ms, formatting.quantity(ms, "ms"), colour) for name, ms, colour in parts]
    total = formatting.quantity(sum(ms for _, ms, _ in parts), "ms")
    steps = formatting.quantity(times.num_steps, "steps")
    share_bar("Where the time of a step with rounds goes", shares, f"{total}, mean of {steps}")


def _measured(services: Services, source: Source, plain: Run) -> MeasuredSpeedup | None:
    """Computed once for each pair: both are over."""
    known: dict[tuple[int, int], MeasuredSpeedup | None] = st.session_state.setdefault(_KNOWN, {})
    pair, num_tokens = (source.run.run_id, plain.run_id), source.num_tokens_behind_the_first
    if not num_tokens:  # of a run that came to its end before any request did
        return None
    if pair not in known:
        rows = services.repository.request_times(plain.run_id)
        begin = min((row["arrival_time"] for row in rows if _is_measured(row)), default=0.0)
        plain_steps = [
            row
            for row in services.repository.steps(plain.run_id)
            if row["end_time"] is not None and row["end_time"] - row["duration_ms"] / 1e3 >= begin
        ]
        known[pair] = measure_speedup(
            source.measured,
            rates_by_position(source.measured),
            services.repository.steps(source.run.run_id),
            plain_steps,
            num_tokens=num_tokens,
            method=method_of(source.run) or "",
        )
    return known[pair]


def _is_measured(row: Mapping[str, Any]) -> bool:
    return not row["warmup"] and row["arrival_time"] is not None


def _warning(services: Services, source: Source, plain: Run) -> str | None:
    """What else than speculation may make the difference."""
    clauses = []
    if not differs_in_speculation_only(source.run, plain):
        clauses.append("their other settings differ")
    rows = services.repository.request_times(plain.run_id)
    clauses += asked_differently(source.records.values(), rows)
    return f"The measured difference is not speculation's alone: {'; '.join(clauses)}." if clauses else None
