"""Why a request was slow: what a part of its life went by with, and who else was in its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from backend.metrics.request_timeline import RequestTimeline, RunTimelines, Span, SpanKind

Cause = SpanKind | Literal["decode_beside_prompts"]


@dataclass(slots=True)
class Part:
    """One cause's share of a delay. Steps and tokens are those of steps that began in it, with the request or while it waited."""

    cause: Cause
    seconds: float = 0.0
    num_steps: int = 0
    own_tokens: int = 0
    others_prompt_tokens: int = 0  # prefill and recomputation
    others_decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delay:
    """A stretch of a request's time, by cause; the parts add up to it."""

    start: float
    end: float
    parts: tuple[Part, ...]  # the longest first

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Company:
    """Another request, in the steps that ran this one."""

    request_id: str
    num_steps: int  # in common
    prompt_tokens: int  # its, in those steps: prefill and recomputation
    decode_tokens: int


def delay(timelines: RunTimelines, timeline: RequestTimeline, start: float, end: float) -> Delay:
    """What the request's time from `start` to `end` went by with; what of it lies outside its life is left out.

    A step that decodes it counts apart when it ran prompt tokens too: that is what makes such a step long.
    """
    start, end = max(start, timeline.start), min(end, timeline.end)
    parts: dict[Cause, Part] = {}
    own = _own_tokens(timelines, timeline.request_id)
    for span in timeline.spans:
        if span.end <= start or span.start >= end:
            continue
        for cause, steps, seconds in _pieces(timelines, span, max(span.start, start), min(span.end, end)):
            part = parts.setdefault(cause, Part(cause))
            part.seconds += seconds
            if steps and timelines.composition.start_of(steps.start) < start:
                continue  # its token came before
            part.num_steps += len(steps)
            tokens = timelines.composition.tokens_in(steps)
            mine = [own.get(step, (span.kind, 0)) for step in steps] if span.is_running else []
            for kind, num_tokens in mine:
                tokens[kind] -= num_tokens
                part.own_tokens += num_tokens
            part.others_decode_tokens += tokens.pop("decode")
            part.others_prompt_tokens += sum(tokens.values())
    ordered = sorted(parts.values(), key=lambda part: -part.seconds)
    return Delay(start, end, tuple(ordered))


def longest_gap(emission_times: Sequence[float]) -> tuple[int, float, float] | None:
    """(which delivery ended it, counted from 0; its start; its end); the first of equals; None below two deliveries."""
    gaps = [(later - earlier, place) for place, (earlier, later) in enumerate(pairwise(emission_times), start=1)]
    if not gaps:
        return None
    _, place = max(gaps, key=lambda gap: (gap[0], -gap[1]))
    return place, emission_times[place - 1], emission_times[place]


def company(timelines: RunTimelines, timeline: RequestTimeline) -> list[Company]:
    """Who shared the request's steps, the one with most prompt tokens in them first."""
    composition = timelines.composition
    inside = np.zeros(len(composition.steps), dtype=bool)
    for span in timeline.spans:
        if span.is_running:
            inside[span.first_step - composition.first_step : span.end_step - composition.first_step] = True
    found = []
    for request_id in timelines.request_ids:
        if request_id == timeline.request_id:
            continue
        num_steps, prompt, decode = 0, 0, 0
        for run in timelines.runs_of(request_id):
            shared = inside[run.first_step - composition.first_step : run.end_step - composition.first_step]
            if not shared.any():
                continue
            tokens = int(np.array(run.num_tokens)[shared].sum())
            num_steps += int(shared.sum())
            prompt, decode = (prompt, decode + tokens) if run.kind == "decode" else (prompt + tokens, decode)
        if num_steps:
            found.append(Company(request_id, num_steps, prompt, decode))
    return sorted(found, key=lambda other: (-other.prompt_tokens, -other.num_steps))


def _pieces(timelines: RunTimelines, span: Span, start: float, end: float) -> Iterator[tuple[Cause, range, float]]:
    """A stretch of a span as (cause, steps, seconds): a wait as it is, what ran step by step."""
    composition = timelines.composition
    if not span.is_running:
        yield span.kind, composition.steps_begun(start, end), end - start
        return
    for step in composition.steps_under_way(start, end):
        cause: Cause = span.kind
        tokens = composition.tokens_in(range(step, step + 1))
        if cause == "decode" and sum(tokens.values()) > tokens["decode"]:
            cause = "decode_beside_prompts"
        seconds = min(end, composition.start_of(step + 1)) - max(start, composition.start_of(step))
        yield cause, range(step, step + 1), seconds


def _own_tokens(timelines: RunTimelines, request_id: str) -> dict[int, tuple[str, int]]:
    """Step -> what it ran of the request."""
    return {
        step: (run.kind, num_tokens)
        for run in timelines.runs_of(request_id)
        for step, num_tokens in enumerate(run.num_tokens, start=run.first_step)
    }
