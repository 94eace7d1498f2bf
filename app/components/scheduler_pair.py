"""In words, what a run's schedule left idle, and what two runs on the same arrivals differ in."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app import formatting
from app.components import figures, notes
from app.components.scheduler_source import Source
from backend.analysis.batching import compare_batching
from backend.analysis.kv_size import count_of
from backend.analysis.same_requests import request_differences
from backend.experiments.compare import flatten, metric_value

_IDLE = (
    "Slot-steps without a request, of all: a step has as many slots as `scheduler.max_num_seqs` says. The queue's share was "
    "idle while as many requests waited: for the end of a static batch, for KV blocks, or for room in the step's token budget."
)
_MAX_SETTINGS = 6
_RATE = "output_throughput_tok_s"


def show(sources: Sequence[Source]) -> None:
    if len(sources) == 1:
        _one(sources[0])
    else:
        _two(sources[0], sources[1])


def sentences(first: Source, second: Source) -> list[str]:
    """Of two runs: how idle each was, which gave more, what differs. Plain text."""
    said = [_idle_sentence(source) for source in (first, second)]
    ours, theirs = (metric_value(source.run.summary, _RATE) for source in (first, second))
    if ours and theirs:
        faster, slower = (first, second) if ours >= theirs else (second, first)
        high, low = max(ours, theirs), min(ours, theirs)
        said.append(
            f"{faster.run.title} has ×{high / low:.2f} the output throughput of {slower.run.title}: "
            f"{formatting.metric(_RATE, high)} against {formatting.metric(_RATE, low)}."
        )
    else:
        said.append("Their throughput can be compared once both have finished.")
    said.append(_settings_sentence(first, second))
    closed_form = _closed_form_sentence(first, second)
    return said if closed_form is None else [*said, closed_form]


def warning(first: Source, second: Source) -> str | None:
    """What makes the two not comparable: they were not asked the same."""
    clauses = request_differences(list(first.records.values()), list(second.records.values()))
    if not clauses:
        return None
    return f"These runs were not asked the same, so their schedules differ for that reason too: {'; '.join(clauses)}."


def _one(source: Source) -> None:
    use = source.slot_use
    tokens = source.composition.tokens_in(source.measured_steps)
    preempted = [line.num_preemptions for line in source.measured]
    with figures.row():
        figures.figure(
            "Requests",
            formatting.count(len(source.measured)),
            "Measured requests that any step ran, or that have ended.",
            f"{formatting.count(len(source.lines) - len(source.measured))} to warm up",
        )
        figures.figure(
            "Steps",
            formatting.count(use.num_steps),
            "From the first arrival on, without the warm-up.",
            f"of {count_of(use.num_slots, 'slot')}",
        )
        figures.figure(
            "Idle slots",
            formatting.percent(use.idle_share),
            _IDLE,
            f"queue {formatting.percent(use.idle_while_waiting_share)}",
        )
        figures.figure(
            "Preemptions",
            formatting.count(sum(preempted)),
            "How often a request gave up its blocks, to be computed again or to come back from host memory.",
            count_of(sum(map(bool, preempted)), "request"),
        )
        figures.figure(
            "Recomputed",
            formatting.count(tokens["recompute"]),
            "Tokens run again after preemptions, or in every step where the layout keeps no cache.",
            f"of {formatting.quantity(sum(tokens.values()), 'tokens')}",
        )


def _two(first: Source, second: Source) -> None:
    st.markdown("\n".join(f"- {notes.plain(sentence)}" for sentence in sentences(first, second)))
    text = warning(first, second)
    if text is not None:
        st.warning(notes.plain(text), icon=":material/warning:")


def _idle_sentence(source: Source) -> str:
    use = source.slot_use
    return (
        f"{source.run.title}: {formatting.percent(use.idle_share)} of the slot-steps were idle, "
        f"{formatting.percent(use.idle_while_waiting_share)} while requests waited "
        f"({count_of(use.num_steps, 'step')} of {count_of(use.num_slots, 'slot')})."
    )


def _closed_form_sentence(first: Source, second: Source) -> str | None:
    """Of a static and a continuous run over the same slots: what the lengths alone let expect."""
    batchings = {flatten(source.run.resolved_config or {}).get("scheduler.batching") for source in (first, second)}
    if batchings != {"static", "continuous"} or first.slot_use.num_slots != second.slot_use.num_slots:
        return None
    ended = sorted((row for row in first.records.values() if not row["warmup"]), key=lambda row: row["index"])
    lengths = [row["num_output_tokens"] for row in ended if row["num_output_tokens"]]
    if not lengths:
        return None
    expected = compare_batching(lengths, first.slot_use.num_slots)
    return (
        f"By the answers' lengths alone, all {formatting.count(len(lengths))} waiting at the start and prompts free: "
        f"{formatting.percent(expected.continuous.idle_slot_share)} idle continuous, "
        f"{formatting.percent(expected.static.idle_slot_share)} static, "
        f"×{expected.throughput_ratio:.2f} the output per step."
    )


def _settings_sentence(first: Source, second: Source) -> str:
    asked = [
        flatten(source.run.resolved_config or {}) | flatten(source.run.workload, "workload.")
        for source in (first, second)
    ]
    keys = [key for key in dict.fromkeys((*asked[0], *asked[1])) if asked[0].get(key) != asked[1].get(key)]
    if not keys:
        return "Their settings and workloads are the same."
    parts = [
        f"{key} ({formatting.setting(asked[0].get(key))} | {formatting.setting(asked[1].get(key))})"
        for key in keys[:_MAX_SETTINGS]
    ]
    more = f" and {len(keys) - _MAX_SETTINGS} more" if len(keys) > _MAX_SETTINGS else ""
    return f"They differ in {', '.join(parts)}{more}."
