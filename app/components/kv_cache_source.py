"""Which run, step and request the KV cache page shows: in the address, in the session, and from the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app.components import notes, run_pick
from app.components.kv_cache_steps import StepTimes
from app.components.run_settings import check_settings, num_blocks_of
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
_MAX_DIGITS = 15  # of a step in the address
_SOURCE = "kv-source"
_WHAT = "with a KV cache"
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
    runs = run_pick.listed(services)
    _follow_address(services, runs)
    return run_pick.choose(runs, RUN, _begin_anew) if runs else None


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
        is_known = run_pick.find(services, runs, asked, address[0], _WHAT)
        state[RUN] = asked
        state[STEP] = _step_in(address[1]) if is_known else None
        state[FOLLOW] = state[STEP] is None
        state[REQUEST] = address[2] or None if is_known or not address[0] else None
        state[BESIDE] = _beside(services, address[3], asked)
        if state[REQUEST] is not None and "view" not in st.query_params:
            state[VIEW] = PREFIX_CACHE
    elif state[RUN] is not None:
        # It may be older than those that are listed, or deleted by now.
        is_known = run_pick.find(services, runs, state[RUN], str(state[RUN]), _WHAT)
        if state.get(BESIDE) is not None:
            state[BESIDE] = _beside(services, str(state[BESIDE]), state[RUN])
        if not is_known:
            _begin_anew()
    if state.get(RUN) not in runs:
        state[RUN], state[STEP], state[FOLLOW] = run_pick.default_with_ledger(services, runs), None, True
    if not runs:
        del state[RUN]


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
