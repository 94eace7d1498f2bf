"""What a run's prefix cache did, from its ledger, its requests' records and its workload: read once if the run is over."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import streamlit as st

from app.components.kv_cache_map import request_name
from app.services import Services
from backend.analysis.prefix_cache import FATES, Fate, PrefixCache, Stretch
from backend.analysis.prefix_tree import TreeNode, prefix_tree
from backend.analysis.run_prompts import RunPrompts
from backend.errors import ConfigError, ModelError, ServeLabError
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.prefix_history import PrefixHistory
from backend.tokenizer import Tokenizer, load_tokenizer
from backend.workload.spec import Workload
from backend.workload.targets import Prompt
from db.run_rows import Run

_SOURCE, _PROBLEM = "kv-prefix-source", "kv-prefix-problem"
_COUNTED = re.compile(r"(?!warm-up )[^/]*(/0)?")  # names of requests
_PATIENCE = 10  # a run that goes on is compared anew after so many times what the last comparison took


@dataclass
class Source:
    """Grows with a run that goes on."""

    run_id: int
    block_size: int
    tokenizer: Tokenizer | None  # None where the model is not there any more
    prompts: RunPrompts
    reader: LedgerReader
    history: PrefixHistory
    is_final: bool = False
    last_row: int = 0
    view: View | None = None
    made_at: float = 0.0
    made_in_s: float = 0.0


@dataclass
class View:
    """The run as far as it is compared."""

    cache: PrefixCache
    tokenizer: Tokenizer | None

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


def known(run_id: int) -> View | None:
    """What has been loaded of the run."""
    source: Source | None = st.session_state.get(_SOURCE)
    return source.view if source is not None and source.run_id == run_id else None


def _grown(services: Services, run: Run, source: Source | None) -> Source | None:
    if source is None or source.run_id != run.run_id:
        with st.spinner("Putting the run's prompts together", show_time=True):
            source = st.session_state[_SOURCE] = _open(run)
    chunks = services.repository.chunks(run.run_id, LEDGER_KIND, from_step=source.reader.steps.stop)
    rows = services.repository.request_tokens(run.run_id, after=source.last_row)
    source.reader = source.reader.longer(chunks)
    if not source.history.extend(source.reader) or not source.history.admissions:
        return None
    source.prompts.add(rows)
    source.last_row = max([source.last_row, *(row["row_id"] for row in rows)])
    waited = time.monotonic() - source.made_at
    if source.view is None or run.is_final or ((chunks or rows) and waited > _PATIENCE * source.made_in_s):
        _compare(source)
    source.is_final = run.is_final
    return source


def _open(run: Run) -> Source:
    config: dict[str, Any] = run.resolved_config or {}
    load = run.load or {}
    workload = Workload.from_dict(run.workload)
    tokenizer: Tokenizer | None = None
    problem: ServeLabError | None = None
    try:
        tokenizer = _tokenizer(run.model)
    except ModelError as error:
        problem = error

    def encode(prompt: Prompt) -> list[int]:
        if tokenizer is None:
            assert problem is not None
            raise problem
        text = prompt.text or ""
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if prompt.chat else tokenizer.encode(text)

    prompts = RunPrompts(
        workload, load.get("model", {}), config["model"]["max_model_len"], load.get("prompts_sha256"), encode
    )
    block_size = config["cache"]["block_size"]
    return Source(run.run_id, block_size, tokenizer, prompts, LedgerReader([]), PrefixHistory(block_size))


def _compare(source: Source) -> None:
    begin = time.monotonic()
    known = {request_id: source.prompts.tokens_of(request_id) for request_id in source.history.admissions}
    tokens = {request_id: found for request_id, found in known.items() if found is not None}
    source.view = View(PrefixCache(source.history, tokens), source.tokenizer)
    source.made_at = time.monotonic()
    source.made_in_s = source.made_at - begin


@st.cache_resource(max_entries=2, show_spinner=False)
def _tokenizer(model: str) -> Tokenizer:
    """Raises `ModelError`."""
    from backend.models.sources import resolve_source

    return load_tokenizer(resolve_source(model))
