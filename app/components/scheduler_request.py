"""Why was this request slow: its time as a waterfall, what its steps held beside it, and the largest causes in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import links, notes, palette, scheduler_charts
from app.components.bars import Share, share_bar
from app.components.kv_cache_map import request_name
from app.components.scheduler_pick import REQUEST
from app.components.scheduler_rows import MAX_STEP_BARS, step_rows, waterfall_rows
from app.components.scheduler_source import Source
from app.services import Services
from backend.analysis.delay_words import gap_sentences, ttft_sentences
from backend.analysis.request_delay import company, delay, longest_gap
from backend.metrics.request_timeline import RequestTimeline

_MAX_BARS = 30  # of a waterfall
_MAX_COMPANY = 50
_SELECT = "scheduler-request-select"
_TIME = "seconds since its arrival"


def show(services: Services, sources: Sequence[Source], *, choose: bool) -> None:
    """
    Args:
        choose: offer the choice of another request.
    """
    st.subheader("Why was this one slow?", anchor=False)
    names = list(sources[0].by_name)
    state = st.session_state
    if choose:
        if state.get(REQUEST) is not None and all(state[REQUEST] not in source.by_name for source in sources):
            st.warning(notes.plain(f"There is no request {state[REQUEST]} in this run."))
            state[REQUEST] = None
        _choose(sources[0], names)
    name = state.get(REQUEST)
    if name is None:
        st.caption(
            "Choose a request here, or click its bar above." if choose else "Switch Follow off to choose a request."
        )
        return
    lines = [source.by_name.get(name) for source in sources]
    axis_s = max((line.end - line.start for line in lines if line is not None), default=0.0)
    for source, line in zip(sources, lines, strict=True):
        if line is None:
            st.caption(notes.plain(f"{source.run.title} has no request {name}, or has not come to it."))
        else:
            _request(services, source, line, axis_s, named=len(sources) > 1)


def _choose(source: Source, names: Sequence[str]) -> None:
    state = st.session_state
    slowest = max(
        (line for line in source.measured if _ttft(source, line) is not None),
        key=lambda line: _ttft(source, line) or 0.0,
        default=None,
    )
    state[_SELECT] = state.get(REQUEST) if state.get(REQUEST) in names else None
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox(
            "Request",
            names,
            index=None,
            format_func=lambda name: _label(source, source.by_name[name]),
            key=_SELECT,
            placeholder="choose a request",
            on_change=_take_choice,
        )
        st.button(
            "Slowest first token",
            key="scheduler-slowest",
            icon=":material/hourglass_bottom:",
            on_click=_set,
            args=(None if slowest is None else request_name(slowest.request_id),),
            disabled=slowest is None,
        )


def _request(services: Services, source: Source, line: RequestTimeline, axis_s: float, *, named: bool) -> None:
    name = request_name(line.request_id)
    if named:
        st.markdown(f"**{notes.plain(f'Request {name} in {source.run.title}')}**")
    st.markdown("\n".join(f"- {notes.plain(sentence)}" for sentence in _sentences(services, source, line)))
    links.kv_cache_link(source.run.run_id, "What the prefix cache had of its prompt", request=name)
    st.vega_lite_chart(
        *scheduler_charts.waterfall(waterfall_rows(line, _MAX_BARS, axis_s), f"Request {name}, span by span", _TIME)
    )
    steps = source.composition.steps_under_way(line.start, line.end)
    buckets = source.composition.buckets(steps, MAX_STEP_BARS)
    own = {
        step: (run.kind, tokens)
        for run in source.timelines.runs_of(line.request_id)
        for step, tokens in enumerate(run.num_tokens, start=run.first_step)
    }
    rows = step_rows(buckets, (line.start, line.start + axis_s), zero=line.start, own=own)
    st.vega_lite_chart(*scheduler_charts.step_tokens(rows, "Tokens of the steps meanwhile", _TIME, wide=True))
    _meanwhile(source, steps, own)
    _tables(source, line)


def _sentences(services: Services, source: Source, line: RequestTimeline) -> list[str]:
    record = source.records.get(line.request_id)
    if record is None:
        return [
            "It has not ended: its arrival and its tokens are recorded when it does. What steps ran of it is shown."
        ]
    sentences = [_what(record)]
    ttft = _ttft(source, line)
    if ttft is not None and line.arrival is not None:
        found = delay(source.timelines, line, line.arrival, line.arrival + ttft / 1e3)
        sentences.append(" ".join(ttft_sentences(found, formatting.duration)))
    emissions = services.repository.emission_times(source.run.run_id, line.request_id)
    gap = longest_gap(emissions)
    if gap is not None:
        place, begin, end = gap
        typical = median(later - earlier for earlier, later in pairwise(emissions))
        found = delay(source.timelines, line, begin, end)
        sentences.append(" ".join(gap_sentences(found, place + 1, typical, formatting.duration)))
    return sentences


def _what(record: Mapping[str, Any]) -> str:
    """What was asked and what became of it."""
    prompt, cached = record["num_prompt_tokens"], record["num_cached_tokens"]
    found = f", {formatting.count(cached)} of them found in the prefix cache" if cached else ""
    preempted = record["num_preemptions"]
    lost = f" It was preempted {'once' if preempted == 1 else f'{preempted} times'}." if preempted else ""
    tokens = formatting.quantity(prompt, "prompt tokens")
    return f"{tokens}{found}, {formatting.quantity(record['num_output_tokens'], 'output tokens')}.{lost}"


def _meanwhile(source: Source, steps: range, own: Mapping[int, tuple[str, int]]) -> None:
    """The legend of the picture above, with what each colour adds up to."""
    tokens = source.composition.tokens_in(steps)
    for step in steps:
        kind, num_tokens = own.get(step, ("decode", 0))
        tokens[kind] -= num_tokens
    mine = sum(num_tokens for step, (_, num_tokens) in own.items() if step in steps)
    amounts = {"its own": mine} | {f"others' {kind}": number for kind, number in tokens.items()}
    colours = (palette.IN_USE, *(palette.SPANS[kind] for kind in tokens))
    shares = [
        Share(label, number, formatting.count(number), colour)
        for (label, number), colour in zip(amounts.items(), colours, strict=True)
        if number
    ]
    share_bar(
        "Tokens of these steps",
        shares,
        f"{formatting.count(sum(amounts.values()))} in {formatting.count(len(steps))} steps",
    )


def _tables(source: Source, line: RequestTimeline) -> None:
    others = company(source.timelines, line)
    prompts = sum(other.prompt_tokens for other in others)
    with st.expander(
        f"Who shared its steps ({formatting.count(len(others))} requests, {formatting.count(prompts)} of their prompt tokens)",
        icon=":material/group:",
    ):
        if not others:
            st.caption("Nobody: its steps ran it alone.")
        else:
            rows = [
                {
                    "Request": request_name(other.request_id),
                    "Steps in common": other.num_steps,
                    "Prompt tokens": other.prompt_tokens,
                    "Decode tokens": other.decode_tokens,
                }
                for other in others[:_MAX_COMPANY]
            ]
            st.dataframe(pd.DataFrame(rows), hide_index=True, lazy=False, key=f"scheduler-company-{source.run.run_id}")
            if len(others) > _MAX_COMPANY:
                st.caption(f"The {_MAX_COMPANY} with most prompt tokens; {len(others) - _MAX_COMPANY} more.")
    with st.expander(f"Its spans ({formatting.count(len(line.spans))})", icon=":material/table_rows:"):
        rows = [
            {
                "What": span.kind,
                "From, s": round(span.start - line.start, 6),
                "ms": round(span.seconds * 1e3, 3),
                "First step": span.first_step if span.num_steps else None,
                "Steps": span.num_steps,
                "Tokens": span.num_tokens,
            }
            for span in line.spans
        ]
        st.dataframe(
            pd.DataFrame(rows),
            hide_index=True,
            lazy=False,
            placeholder=formatting.NONE,
            key=f"scheduler-spans-{source.run.run_id}",
        )


def _label(source: Source, line: RequestTimeline) -> str:
    ttft = _ttft(source, line)
    preempted = line.num_preemptions
    parts = [request_name(line.request_id)]
    parts += [f"TTFT {formatting.duration(ttft / 1e3)}"] if ttft is not None else ["no first token recorded"]
    parts += [f"preempted ×{preempted}"] if preempted else []
    return ", ".join(parts)


def _ttft(source: Source, line: RequestTimeline) -> float | None:
    """ms"""
    return source.records.get(line.request_id, {}).get("ttft_ms")


def _take_choice() -> None:
    _set(st.session_state[_SELECT])


def _set(name: str | None) -> None:
    st.session_state[REQUEST] = name
