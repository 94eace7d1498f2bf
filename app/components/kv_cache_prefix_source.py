"""What a run's prefix cache did, from its ledger, its requests' records and its workload: read once if the run is over."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cached_property

import streamlit as st

from app.components import kv_cache_earlier, kv_cache_prompts
from app.components.kv_cache_earlier import Earlier
from app.components.kv_cache_map import request_name
from app.components.kv_cache_prompts import Prompts
from app.services import Services
from backend.analysis.prefix_cache import FATES, Fate, PrefixCache, Stretch
from backend.analysis.prefix_tree import TreeNode, prefix_tree
from backend.errors import ConfigError, DatabaseError, ModelError
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.prefix_history import PrefixHistory
from backend.tokenizer import Tokenizer
from db.run_rows import Run

_SOURCE, _PROBLEM = "kv-prefix-source", "kv-prefix-problem"
_COUNTED = re.compile(r"(?!warm-up )[^/]*(/0)?")  # names of requests
_PATIENCE = 10  # a run that goes on is compared anew after so many times what the last comparison took


@dataclass
class Source:
    """Grows with a run that goes on."""

    run_id: int
    prompts: Prompts
    reader: LedgerReader
    history: PrefixHistory
    earlier: Earlier | None  # of a run that began with a warm cache
    is_final: bool = False
    view: View | None = None
    made_at: float = 0.0
    made_in_s: float = 0.0


@dataclass
class View:
    """The run as far as it is compared."""

    cache: PrefixCache
    tokenizer: Tokenizer | None
    run_id: int

    def name(self, request_id: str) -> str:
        """What stands behind "request"."""
        return kv_cache_earlier.name_in(self.run_id, request_id)

    @cached_property
    def by_name(self) -> dict[str, str]:
        """What stands behind "request" -> id, in order of admission."""
        return {request_name(request_id): request_id for request_id in self.cache.paths}

    @cached_property
    def measured(self) -> list[str]:
        """Whose prompts the run's hit rate counts: without the warm-up, and of the samples of a prompt the first."""
        admissions = self.cache.history.admissions
        return [
            request_id
            for request_id in self.cache.paths
            if not admissions[request_id].is_forked and _COUNTED.fullmatch(request_name(request_id))
        ]

    @cached_property
    def stretches(self) -> dict[str, tuple[Stretch, ...]]:
        return {request_id: self.cache.stretches(request_id) for request_id in self.cache.paths}

    @cached_property
    def tree(self) -> list[TreeNode]:
        return prefix_tree(self.cache, self.measured)

    @cached_property
    def sums(self) -> dict[Fate, int]:
        """Prompt tokens of the measured requests by what became of them."""
        sums = dict.fromkeys(FATES, 0)
        for request_id in self.measured:
            for stretch in self.stretches[request_id]:
                sums[stretch.fate] += stretch.end - stretch.start
        return sums


def load(services: Services, run: Run) -> Source | None:
    """What is known of the run now; None while there is nothing, or when its ledger has no block events.

    Raises `ServeLabError` where the run's prompts cannot be had again.
    """
    source: Source | None = st.session_state.get(_SOURCE)
    if source is None or source.run_id != run.run_id:
        if not run.load or not run.resolved_config:
            return None
        run_id, problem = st.session_state.get(_PROBLEM, (None, ""))
        if run_id == run.run_id:
            raise ConfigError(problem)
    elif source.is_final:
        return source
    try:
        return _grown(services, run, source)
    except (ConfigError, ModelError) as error:  # not tried again and again
        st.session_state[_PROBLEM] = run.run_id, str(error)
        st.session_state.pop(_SOURCE, None)
        raise
    except DatabaseError:  # of a damaged ledger what has been read so far is of no use
        st.session_state.pop(_SOURCE, None)
        raise


def known(run_id: int) -> View | None:
    """What has been loaded of the run."""
    source: Source | None = st.session_state.get(_SOURCE)
    return source.view if source is not None and source.run_id == run_id else None


def _grown(services: Services, run: Run, source: Source | None) -> Source | None:
    if source is None or source.run_id != run.run_id:
        with st.spinner("Putting the run's prompts together", show_time=True):
            source = st.session_state[_SOURCE] = _open(services, run)
    chunks = services.repository.chunks(run.run_id, LEDGER_KIND, from_step=source.reader.steps.stop)
    source.reader = source.reader.longer(chunks)
    if not source.history.extend(source.reader) or not source.history.admissions:
        return None
    if source.earlier is not None:
        source.earlier.blocks.extend(source.reader)
    has_grown = source.prompts.grow(services) or bool(chunks)
    waited = time.monotonic() - source.made_at
    if source.view is None or run.is_final or (has_grown and waited > _PATIENCE * source.made_in_s):
        _compare(source)
    source.is_final = run.is_final
    return source


def _open(services: Services, run: Run) -> Source:
    prompts = kv_cache_prompts.open_prompts(run)
    history = PrefixHistory((run.resolved_config or {})["cache"]["block_size"])
    return Source(run.run_id, prompts, LedgerReader([]), history, kv_cache_earlier.load(services, run))


def _compare(source: Source) -> None:
    begin = time.monotonic()
    known = {request_id: source.prompts.known.tokens_of(request_id) for request_id in source.history.admissions}
    tokens = {request_id: found for request_id, found in known.items() if found is not None}
    earlier = source.earlier
    cache = PrefixCache(source.history, tokens, None if earlier is None else earlier.runs())
    source.view = View(cache, source.prompts.tokenizer, source.run_id)
    source.made_at = time.monotonic()
    source.made_in_s = source.made_at - begin
