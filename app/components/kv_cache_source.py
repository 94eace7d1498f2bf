"""Which run, step and request the KV cache page shows: in the address, in the session, and from the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app.components import activity, notes
from app.components.kv_cache_steps import StepTimes
from app.components.run_settings import check_settings, num_blocks_of
from app.components.run_table import workload_text
from app.services import Services
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from db.run_ids import parse_run_id
from db.run_rows import Run

RUN = "kv-run"
STEP = "kv-at"  # the step that was scrubbed to; None: where the page begins
FOLLOW = "kv-follow"
REQUEST = "kv-prefix-request"  # that is looked into, as `kv_cache_map.request_name` names it
BESIDE = "kv-with"  # a run whose waste is drawn below this one's; None: there is none
ADDRESS = "kv-address"

VIEW = "view"  # which of the page's tabs is open
BLOCKS, PREFIX_CACHE = "Blocks", "Prefix cache"

MAX_POINTS = 300  # of the chart
_MAX_TIMES = 10_000  # rows: runs with more steps have some of their times interpolated
_MAX_LISTED = 200
_MAX_DIGITS = 15  # of a step in the address
_SOURCE = "kv-source"
_NAMES = ("run", "step", "request", "with")  # in the address


@dataclass(frozen=True, slots=True)
class Source:
    """What the database has of a run, read once if the run is over."""

    run_id: int
    is_final: bool
    num_blocks: int
    block_size: int
    history: PoolHistory
    times: StepTimes
    rows: Sequence[Any]  # of steps, for the chart

    @property
    def steps(self) -> range:
        return self.history.steps

    @property
    def first_shown(self) -> int:
        """Where the page begins: a run that is over with its fullest step, one that goes on with its newest."""
        peak = self.times.peak_step
        return peak if self.is_final and peak is not None and peak in self.steps else self.steps[-1]

    def clamp(self, step: int) -> int:
        return min(max(step, self.steps.start), self.steps[-1])


def pick(services: Services) -> Run | None:
    """The run that the address names, by default the one that goes on, else the newest with a ledger."""
    runs = {run.run_id: run for run in services.repository.list(kind="serve", limit=_MAX_LISTED)}
    _follow_address(services, runs)
    if not runs:
        return None
    st.selectbox("Run", list(runs), format_func=lambda run_id: run_name(runs[run_id]), key=RUN, on_change=_begin_anew)
    return runs[st.session_state[RUN]]


def write_address(run_id: int, step: int | None, request: str | None = None) -> None:
    """A step that is followed has no place in the address: who opens it follows as well."""
    wanted = {"run": str(run_id)}
    others = {"step": step, "request": request, "with": st.session_state.get(BESIDE)}
    wanted |= {name: str(value) for name, value in others.items() if value is not None}
    st.session_state[ADDRESS] = tuple(wanted.get(name, "") for name in _NAMES)
    for name in _NAMES:
        if name in wanted and st.query_params.get(name) != wanted[name]:
            st.query_params[name] = wanted[name]
        elif name not in wanted and name in st.query_params:
            del st.query_params[name]


def load(services: Services, run: Run) -> Source | None:
    """What there is of the run's ledger now; None while there is none. Raises `DatabaseError` for a damaged record."""
    known: Source | None = st.session_state.get(_SOURCE)
    if known is not None and (known.run_id, known.is_final) == (run.run_id, True):
        return known
    if not run.load or not run.resolved_config:
        return None
    check_settings(run)
    num_blocks, block_size = num_blocks_of(run), run.resolved_config["cache"]["block_size"]
    if known is not None and known.run_id == run.run_id:
        history = known.history
        history.extend(services.repository.chunks(run.run_id, LEDGER_KIND, from_step=history.steps.stop))
    else:
        history = PoolHistory(LedgerReader(services.repository.chunks(run.run_id, LEDGER_KIND)), block_size)
    if not history.steps:
        return None
    rows = services.repository.steps(run.run_id, max_points=MAX_POINTS)
    # A look at a run that goes on is to cost little, and it is mostly at the newest step, whose end is in the last row.
    timed = services.repository.steps(run.run_id, max_points=_MAX_TIMES) if run.is_final else rows
    source = Source(run.run_id, run.is_final, num_blocks, block_size, history, StepTimes(timed), rows)
    st.session_state[_SOURCE] = source
    return source


def _follow_address(services: Services, runs: dict[int, Run]) -> None:
    """Take what the address says when something else than the page changed it; see to it that the run can be shown."""
    state = st.session_state
    address = tuple(st.query_params.get(name, "") for name in _NAMES)
    if address != state.get(ADDRESS) or RUN not in state:
        asked = parse_run_id(address[0])
        _add(services, runs, asked)
        is_known = asked in runs
        if address[0] and not is_known:
            _warn_of(address[0])
        state[RUN] = asked
        state[STEP] = _step_in(address[1]) if is_known else None
        state[FOLLOW] = state[STEP] is None
        state[REQUEST] = address[2] or None if is_known or not address[0] else None
        state[BESIDE] = _beside(services, address[3], asked)
        if state[REQUEST] is not None and "view" not in st.query_params:
            state[VIEW] = PREFIX_CACHE
    elif state[RUN] is not None:
        _add(services, runs, state[RUN])  # it may be older than those that are listed
        if state.get(BESIDE) is not None:
            state[BESIDE] = _beside(services, str(state[BESIDE]), state[RUN])
        if state[RUN] not in runs:
            _warn_of(str(state[RUN]))
            _begin_anew()
    if state.get(RUN) not in runs:
        state[RUN], state[STEP], state[FOLLOW] = _default(services, runs), None, True
    if not runs:
        del state[RUN]


def _default(services: Services, runs: dict[int, Run]) -> int | None:
    snapshot = services.queue.live()
    if activity.is_active(snapshot) and snapshot.run_id in runs:
        return snapshot.run_id
    with_ledger = (run_id for run_id in runs if services.repository.chunks(run_id, LEDGER_KIND))
    return next(with_ledger, next(iter(runs), None))


def _add(services: Services, runs: dict[int, Run], run_id: int | None) -> None:
    run = services.repository.get(run_id) if run_id is not None and run_id not in runs else None
    if run is not None and run.kind == "serve":
        runs[run.run_id] = run


def _warn_of(name: str) -> None:
    st.warning(notes.plain(f"There is no run {name} with a KV cache. It may have been deleted."))


def _step_in(text: str) -> int | None:
    """The step that an address asks for; None for what is no number, or none that a run comes to."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _beside(services: Services, text: str, shown: int | None) -> int | None:
    """The run that is asked for beside the one that is shown; that one itself is not shown twice."""
    asked = parse_run_id(text)
    run = None if asked is None else services.repository.get(asked)
    if run is not None and run.kind == "serve":
        return None if run.run_id == shown else run.run_id
    if text:
        st.warning(notes.plain(f"There is no run {text} to show beside. It may have been deleted."))
    return None


def _begin_anew() -> None:
    state = st.session_state
    state[STEP], state[FOLLOW], state[REQUEST], state[BESIDE] = None, True, None, None


def run_name(run: Run) -> str:
    """Of what does not change while the run goes on: the browser keeps the name that it has shown."""
    return f"{run.title}: {run.model}, {workload_text(run.workload)}"
