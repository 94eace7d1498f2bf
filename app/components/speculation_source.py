"""A run's rounds as the database has them now: read once if the run is over, else as far as they have grown."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import streamlit as st

from app.components.kv_cache_map import request_name
from app.services import Services
from backend.analysis.draft_rounds import RoundColumns, RoundHistory
from backend.analysis.run_prompts import is_warmup
from backend.errors import DatabaseError, ModelError
from backend.metrics.speculation_ledger import SPECULATION_KIND
from backend.tokenizer import Tokenizer, load_tokenizer
from db.run_rows import Run

_SOURCES = "speculation-sources"
_MAX_KEPT = 4  # runs


@dataclass
class Source:
    """At one look."""

    run: Run
    history: RoundHistory
    records: Mapping[str, Mapping[str, Any]]  # request id -> its row, without what is long; of requests that have ended
    times: list[tuple[int, float, float]]  # (step, start, end) in seconds since the run's start
    problem: str | None = None  # why later rounds of its ledger are not among those that are known
    stored_outputs: dict[str, bool] = field(default_factory=dict)

    @cached_property
    def measured_ids(self) -> list[str]:
        """Requests with rounds, without the warm-up: in the order of the workload, those without a record yet at the end."""
        places = {request_id: place for place, request_id in enumerate(self.records)}
        ids = [it for it in self.history.request_ids if not is_warmup(it)]
        return sorted(ids, key=lambda it: places.get(it, len(places)))

    @cached_property
    def by_name(self) -> dict[str, str]:
        """Request id by the name it has on the page."""
        return {request_name(request_id): request_id for request_id in self.measured_ids}

    @cached_property
    def measured(self) -> RoundColumns:
        return self.history.of(self.measured_ids)

    @property
    def num_missing(self) -> int:
        """Rounds that the records of requests count and the ledger does not hold."""
        held = self.history.totals()
        counted = ((request_id, row["num_rounds"] or 0) for request_id, row in self.records.items())
        return sum(max(0, count - held.get(request_id, 0)) for request_id, count in counted)

    @property
    def num_tokens_behind_the_first(self) -> int:
        """Of the outputs of all measured requests that have ended."""
        rows = (row for row in self.records.values() if not row["warmup"])
        return sum(max(0, (row["num_output_tokens"] or 0) - 1) for row in rows)


def load(services: Services, run: Run) -> Source | None:
    """What there is of the run's rounds; None while there is none.

    Raises `DatabaseError` for a ledger of which nothing can be shown.
    """
    sources: dict[int, Source] = st.session_state.setdefault(_SOURCES, {})
    known = sources.get(run.run_id)
    if known is not None and known.run.is_final:
        return known
    history = RoundHistory() if known is None else known.history
    problem = None
    chunks = services.repository.chunks(run.run_id, SPECULATION_KIND, from_step=history.next_step)
    try:
        with st.spinner("Reading the run's rounds") if known is None else nullcontext():
            history.extend(chunks)
    except DatabaseError as error:
        problem = str(error)
    if not history.request_ids:
        if problem is not None:
            raise DatabaseError(problem)
        return None
    records = {row["request_id"]: row for row in services.repository.request_times(run.run_id)}
    source = Source(run, history, records, services.repository.step_times(run.run_id), problem)
    # What the page showed before is read again when it is asked for again.
    st.session_state[_SOURCES] = dict([*sources.items(), (run.run_id, source)][-_MAX_KEPT:])
    return source


def tokenizer_of(services: Services, source: Source, request_id: str) -> Tokenizer | None:
    """That of the run's model, where it is still here and the run has stored what the request's output was."""
    if request_id not in source.records:
        return None
    if request_id not in source.stored_outputs:
        rows = services.repository.request_tokens(source.run.run_id)
        source.stored_outputs |= {row["request_id"]: row["token_ids"] is not None for row in rows}
    if not source.stored_outputs.get(request_id):
        return None
    try:
        return _tokenizer(source.run.model)
    except ModelError:
        return None


@st.cache_resource(max_entries=2, show_spinner=False)
def _tokenizer(model: str) -> Tokenizer:
    """Raises `ModelError`."""
    from backend.models.sources import resolve_source

    return load_tokenizer(resolve_source(model))
