"""What KV slots were held for over whole runs, from the database: of the run that is shown, and of one asked the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import streamlit as st

from app.components.run_settings import check_settings, num_blocks_of
from app.services import Services
from backend.analysis.same_requests import request_differences
from backend.errors import DatabaseError
from backend.metrics.kv_use import KVPool
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.waste_history import WasteHistory, WasteTotals
from db.run_rows import Run

Record = Mapping[str, Any]

_SOURCES = "kv-waste-sources"
_ALIKE = "kv-waste-alike"  # two run ids -> whether they were asked the same
_MAX_LISTED = 200
_MAX_READ = 40  # runs whose requests are looked at


@dataclass
class RunWaste:
    """At one look; times are seconds since the run's start."""

    run: Run
    history: WasteHistory
    times: Sequence[tuple[int, float, float]]  # (step, start, end); empty as long as the run goes on
    records: Sequence[Record]  # of its requests, likewise

    @cached_property
    def first_arrival(self) -> float:
        """Of a measured request; 0 where none is known."""
        return min((row["arrival_time"] for row in _measured(self.records)), default=0.0)

    @cached_property
    def first_step(self) -> int:
        """Of those in the ledger that began at the first arrival or later."""
        known = self.history.steps
        steps = (step for step, start, _ in self.times if start >= self.first_arrival and step in known)
        return next(steps, known.start)

    @cached_property
    def totals(self) -> WasteTotals:
        """Without the warm-up, once the run is over."""
        return self.history.totals(self.first_step)

    def starts_of(self, steps: Sequence[int]) -> list[float]:
        """When steps began; of the one behind the last, when that one ended."""
        known = [step for step, _, _ in self.times] + [self.times[-1][0] + 1]
        starts = [start for _, start, _ in self.times] + [self.times[-1][2]]
        return np.interp(steps, known, starts).tolist()


def layout_of(run: Run) -> str | None:
    """None where it is not known."""
    try:
        check_settings(run)
    except DatabaseError:
        return None
    return (run.resolved_config or {})["cache"]["layout"]


def load(services: Services, run: Run) -> RunWaste | None:
    """What there is of the run's ledger now; None while there is none, and without block events.

    Raises `DatabaseError` for a damaged ledger or record.
    """
    if not run.load or not run.resolved_config:
        return None
    check_settings(run)
    known: dict[int, RunWaste] = st.session_state.setdefault(_SOURCES, {})
    found = known.get(run.run_id)
    if found is None or not found.run.is_final:
        pool = KVPool.of_run(run.resolved_config, run.load.get("model", {}), num_blocks_of(run))
        history = WasteHistory(run.resolved_config["cache"]["block_size"], pool) if found is None else found.history
        history.extend(services.repository.chunks(run.run_id, LEDGER_KIND, from_step=history.next_step))
        times = services.repository.step_times(run.run_id) if run.is_final else ()
        records = services.repository.request_times(run.run_id) if run.is_final else ()
        found = RunWaste(run, history, times, records)
    # In place: a look that is broken off by the next one has then not added up all steps for nothing. A page shows two at
    # most; what it showed before is read again when it is asked for again.
    known.pop(run.run_id, None)
    known[run.run_id] = found
    for run_id in list(known)[:-2]:
        del known[run_id]
    return found if found.history.steps else None


def asked_the_same(services: Services, waste: RunWaste) -> list[Run]:
    """Runs that are over with the same requests: those with another layout first, then those of the same model, newest first."""
    run = waste.run
    if not _measured(waste.records):
        return []
    others = [
        other
        for other in services.repository.list(kind="serve", statuses=("finished",), limit=_MAX_LISTED)
        if other.run_id != run.run_id and other.num_requests == run.num_requests and other.load and layout_of(other)
    ]
    others.sort(key=lambda other: (other.workload != run.workload, other.model != run.model))
    alike = [other for other in others[:_MAX_READ] if _is_alike(services, waste, other)]
    return sorted(alike, key=lambda other: (layout_of(other) == layout_of(run), other.model != run.model))


def differences(first: RunWaste, second: RunWaste) -> list[str]:
    """See `request_differences`."""
    return request_differences(first.records, second.records)


def arrivals_depend_on_speed(run: Run) -> bool:
    """Whether requests wait for answers to others, so that no other run has the same arrivals."""
    return run.workload["arrivals"]["kind"] == "closed_loop" or run.workload["source"]["kind"] == "conversations"


def _is_alike(services: Services, waste: RunWaste, other: Run) -> bool:
    """Runs that are over do not change: each two are looked at once in a session."""
    known: dict[tuple[int, int], bool] = st.session_state.setdefault(_ALIKE, {})
    pair = (waste.run.run_id, other.run_id)
    if pair not in known:
        records = services.repository.request_times(other.run_id)
        known[pair] = bool(_measured(records)) and not request_differences(waste.records, records)
    return known[pair]


def _measured(records: Sequence[Record]) -> list[Record]:
    return [row for row in records if not row["warmup"] and row["arrival_time"] is not None]
