"""A run's schedule as the database has it now: read once if the run is over, else as far as it has grown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import streamlit as st

from app.components.kv_cache_map import request_name
from app.components.run_settings import check_settings
from app.services import Services
from backend.analysis.slot_use import SlotUse, slot_use
from backend.errors import DatabaseError
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.ledger_reader import Chunk, break_between, read_stored
from backend.metrics.request_timeline import RequestTimeline, RunTimelines
from backend.metrics.step_composition import StepComposition
from db.run_rows import Run

MAX_ROWS = 200  # requests that are shown at first

_SOURCES = "scheduler-sources"


@dataclass
class Source:
    """Times are seconds since the run's start."""

    run: Run
    timelines: RunTimelines
    records: Mapping[str, Mapping[str, Any]]  # request id -> its row, without what is long; of requests that have ended
    problem: str | None = None  # why later steps of its ledger are not among those that are known

    @property
    def composition(self) -> StepComposition:
        return self.timelines.composition

    @property
    def num_slots(self) -> int:
        return (self.run.resolved_config or {})["scheduler"]["max_num_seqs"]

    @cached_property
    def lines(self) -> list[RequestTimeline]:
        """Of all requests that are known, in the order in which they arrived."""
        found = []
        for request_id in dict.fromkeys((*self.timelines.request_ids, *self.records)):
            record = self.records.get(request_id, {})
            line = self.timelines.timeline(request_id, record.get("arrival_time"), record.get("finish_time"))
            if line is not None:
                found.append(line)
        places = {request_id: record["index"] for request_id, record in self.records.items()}
        return sorted(found, key=lambda line: (line.start, places.get(line.request_id, len(places))))

    @cached_property
    def by_name(self) -> dict[str, RequestTimeline]:
        return {request_name(line.request_id): line for line in self.lines}

    @cached_property
    def measured(self) -> list[RequestTimeline]:
        """Without the warm-up, as far as it is known: who has no record yet is not taken for it."""
        return [line for line in self.lines if not self.records.get(line.request_id, {}).get("warmup")]

    @cached_property
    def first_arrival(self) -> float:
        return min((line.start for line in self.measured), default=0.0)

    @cached_property
    def end(self) -> float:
        ends = [line.end for line in self.lines]
        return max([*ends, float(self.composition.ends[-1])])

    @cached_property
    def measured_steps(self) -> range:
        """From the first arrival on, behind the warm-up."""
        return self.composition.steps_begun(self.first_arrival, float("inf"))

    @cached_property
    def slot_use(self) -> SlotUse:
        """Over the measured steps."""
        return slot_use(self.composition, self.lines, self.num_slots, self.measured_steps)


def load(services: Services, run: Run) -> Source | None:
    """What there is of the run's schedule; None while there is none.

    Raises `DatabaseError` for a damaged record, and for a ledger of which no step can be shown.
    """
    if not run.resolved_config:
        return None
    check_settings(run)
    sources: dict[int, Source] = st.session_state.setdefault(_SOURCES, {})
    known = sources.get(run.run_id)
    if known is not None and known.run.is_final:
        return known
    timelines = RunTimelines() if known is None else known.timelines
    begin = timelines.composition.steps.stop
    times = services.repository.step_times(run.run_id, from_step=begin)
    chunks = services.repository.chunks(run.run_id, LEDGER_KIND, from_step=begin)
    problem = None
    try:
        timelines.extend(_steps_of(chunks, begin), times)
    except DatabaseError as error:
        problem = str(error)
    end = timelines.composition.steps.stop
    if problem is None and run.is_final and chunks and end <= chunks[-1][2]:
        problem = f"the time of step {end:,} is not known"
    if not timelines.composition.steps:
        if problem is not None:
            raise DatabaseError(problem)
        return None
    records = {row["request_id"]: row for row in services.repository.request_times(run.run_id)}
    source = Source(run, timelines, records, problem)
    # A page shows two at most; what it showed before is read again when it is asked for again.
    st.session_state[_SOURCES] = dict([*sources.items(), (run.run_id, source)][-2:])
    return source


def _steps_of(chunks: Sequence[Chunk], begin: int) -> Iterator[LedgerStep]:
    """From step `begin` on, which may lie within the first chunk. Raises `DatabaseError` where they do not go on."""
    end = begin
    for place, chunk in enumerate(chunks):
        words = break_between(end, chunk[1]) if place or chunk[1] > begin else None
        if words is not None:
            raise DatabaseError(f"the step ledger is damaged: {words}")
        yield from read_stored(chunk).steps
        end = chunk[2] + 1


def first_window(sources: Sequence[Source], zeros: Sequence[float], *, newest: bool) -> tuple[float, float]:
    """Where the page begins, on the time axis: the measured part, or as much as holds `MAX_ROWS` requests of each run.

    Args:
        zeros: the zero of the time axis in each run's time.
        newest: of what is too long, its end and not its beginning.
    """
    begin = min(source.first_arrival - zero for source, zero in zip(sources, zeros, strict=True))
    end = max(source.end - zero for source, zero in zip(sources, zeros, strict=True))
    for source, zero in zip(sources, zeros, strict=True):
        if len(source.measured) <= MAX_ROWS:
            continue
        if newest:
            begin = max(begin, sorted(line.end for line in source.measured)[-MAX_ROWS] - zero)
        else:
            end = min(end, sorted(line.start for line in source.measured)[MAX_ROWS] - zero)
    return (begin, end) if begin < end else (begin, begin + 1e-3)
