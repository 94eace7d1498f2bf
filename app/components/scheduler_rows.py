"""The data of the Scheduler page's charts: spans as bars, steps as bars, few enough for a browser to stay fluid. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from app import formatting
from backend.metrics.ledger_format import STEP_KINDS
from backend.metrics.request_timeline import RequestTimeline, Span
from backend.metrics.step_composition import StepBucket

MAX_BARS = 2000  # of a Gantt chart
MAX_STEP_BARS = 240  # of a chart over steps
OWN = "its own"  # tokens of the request that is looked into
_FINEST = 2000  # of a window is seen
_ROUNDING = 1e-6  # tokens; what is left of a difference of means

Window = tuple[float, float]


class Bar(NamedTuple):
    """Neighbouring spans that are too short to be told apart, or one by itself."""

    kind: str  # what most of its time went by with
    start: float
    end: float
    first_step: int
    end_step: int
    num_tokens: int
    num_spans: int


def visible(lines: Sequence[RequestTimeline], window: Window) -> list[RequestTimeline]:
    return [line for line in lines if line.start < window[1] and line.end > window[0]]


def bars_of(lines: Sequence[RequestTimeline], window: Window, max_bars: int = MAX_BARS) -> list[list[Bar]]:
    """For each line its bars within the window, at most `max_bars` in all as long as there are no more lines than that."""
    cut = [_within(line.spans, window) for line in lines]
    resolution = (window[1] - window[0]) / _FINEST
    while resolution < window[1] - window[0] and sum(_num_bars(spans, resolution) for spans in cut) > max_bars:
        resolution *= 2
    return [_merged(spans, resolution) for spans in cut]


def gantt_rows(
    lines: Sequence[RequestTimeline],
    names: Mapping[str, str],
    window: Window,
    *,
    zero: float = 0.0,
    chosen: str | None = None,
    max_bars: int = MAX_BARS,
) -> pd.DataFrame:
    """A row per bar, in the order of the requests, and an invisible frame as wide as the window.

    Args:
        names: request id -> how it is called.
        window: on the clock of the lines.
        zero: where the time axis begins, on that clock.
        chosen: the request that is looked into.
    """
    rows: list[dict[str, Any]] = [_frame(window[0] - zero), _frame(window[1] - zero)]
    for line, bars in zip(lines, bars_of(lines, window, max_bars), strict=True):
        for bar in bars:
            row = {
                "part": "bar",
                "row": names[line.request_id],
                "request_id": line.request_id,
                "faint": chosen is not None and line.request_id != chosen,
                "x": bar.start - zero,
                "x2": bar.end - zero,
            }
            rows.append(row | _described(bar))
    columns = ["part", "row", "request_id", "faint", "x", "x2", *_DESCRIBED]
    return pd.DataFrame(rows, columns=columns)


def waterfall_rows(line: RequestTimeline, max_bars: int, axis_s: float) -> pd.DataFrame:
    """A row per span of one request, in seconds since its beginning; spans too short to be seen go together.

    Args:
        axis_s: how long the time axis is.
    """
    (bars,) = bars_of([line], (line.start, line.end), max_bars)
    rows = [_frame(0.0), _frame(axis_s)]
    for place, bar in enumerate(bars, start=1):
        times = {"x": bar.start - line.start, "x2": bar.end - line.start}
        rows.append({"part": "bar", "row": f"{place}. {_name(bar)}"} | times | _described(bar))
    return pd.DataFrame(rows, columns=["part", "row", "x", "x2", *_DESCRIBED])


def step_rows(
    buckets: Sequence[StepBucket],
    window: Window,
    *,
    zero: float = 0.0,
    own: Mapping[int, tuple[str, int]] | None = None,
) -> pd.DataFrame:
    """Tokens of a step by kind on top of each other, and how long the step took, all within the window.

    Args:
        own: step -> kind and tokens that it ran of one request, which are drawn by themselves, below the others'.
    """
    rows: list[dict[str, Any]] = [_frame(window[0] - zero), _frame(window[1] - zero)]
    for bucket in buckets:
        place = {
            "x": max(bucket.start, window[0]) - zero,
            "x2": min(bucket.end, window[1]) - zero,
            "steps": _steps(bucket.first_step, bucket.end_step),
        }
        height = 0.0
        for kind, tokens in _by_kind(bucket, own or {}).items():
            if tokens > _ROUNDING:
                bar = {"part": "tokens", "kind": kind, "y": height, "y2": height + tokens, "tokens": tokens}
                rows.append(place | bar)
                height += tokens
        rows.append(place | {"part": "time", "y": 0.0, "y2": bucket.longest_s * 1e3})
    return pd.DataFrame(rows, columns=["part", "kind", "x", "x2", "y", "y2", "tokens", "steps"])


_DESCRIBED = ("kind", "took", "steps", "tokens", "what")


def _described(bar: Bar) -> dict[str, Any]:
    return {
        "kind": bar.kind,
        "took": formatting.duration(bar.end - bar.start),
        "steps": _steps(bar.first_step, bar.end_step),
        "tokens": bar.num_tokens,
        "what": bar.kind if bar.num_spans == 1 else f"mostly {bar.kind} ({formatting.count(bar.num_spans)} spans)",
    }


def _name(bar: Bar) -> str:
    kind = bar.kind if bar.num_spans == 1 else f"mostly {bar.kind}"
    tokens = f" {formatting.count(bar.num_tokens)} tok" if bar.num_tokens else ""
    return f"{kind}{tokens}, {formatting.duration(bar.end - bar.start)}"


def _steps(first: int, end: int) -> str:
    if end <= first:
        return formatting.NONE
    return formatting.count(first) if end == first + 1 else f"{formatting.count(first)} to {formatting.count(end - 1)}"


def _by_kind(bucket: StepBucket, own: Mapping[int, tuple[str, int]]) -> dict[str, float]:
    tokens: dict[str, float] = dict(zip(STEP_KINDS, bucket.num_tokens, strict=True))
    num_steps, mine = bucket.end_step - bucket.first_step, 0.0
    for step in range(bucket.first_step, bucket.end_step) if own else ():
        kind, num_tokens = own.get(step, ("decode", 0))
        tokens[kind] -= num_tokens / num_steps
        mine += num_tokens / num_steps
    return {OWN: mine} | tokens


def _frame(x: float) -> dict[str, Any]:
    """The axis is as long as the window, whatever is drawn in it."""
    return {"part": "frame", "x": x}


def _within(spans: Sequence[Span], window: Window) -> list[Span]:
    inside = [span for span in spans if span.start < window[1] and span.end > window[0]]
    if inside:
        inside[0] = inside[0]._replace(start=max(inside[0].start, window[0]))
        inside[-1] = inside[-1]._replace(end=min(inside[-1].end, window[1]))
    return inside


def _num_bars(spans: Sequence[Span], resolution: float) -> int:
    """How many `_merged` gives; it is asked for every resolution that is tried."""
    number, since = 0, None
    for _, start, end, *_ in spans:
        if end - start >= resolution:
            number += 1 if since is None else 2
            since = None
        else:
            since = start if since is None else since
            if end - since >= resolution:
                number, since = number + 1, None
    return number if since is None else number + 1


def _merged(spans: Sequence[Span], resolution: float) -> list[Bar]:
    """Spans in order; those shorter than the resolution go together until they are as long as it."""
    bars: list[Bar] = []
    short: list[Span] = []
    for span in spans:
        if span.seconds >= resolution:
            bars += [_bar(short), _bar([span])] if short else [_bar([span])]
            short = []
        else:
            short.append(span)
            if span.end - short[0].start >= resolution:
                bars.append(_bar(short))
                short = []
    return [*bars, _bar(short)] if short else bars


def _bar(spans: Sequence[Span]) -> Bar:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.seconds
    return Bar(
        kind=max(seconds, key=lambda kind: seconds[kind]),
        start=spans[0].start,
        end=spans[-1].end,
        first_step=min(span.first_step for span in spans),
        end_step=max(span.end_step for span in spans),
        num_tokens=sum(span.num_tokens for span in spans),
        num_spans=len(spans),
    )
