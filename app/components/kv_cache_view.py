"""The KV cache page below its run: the map of the pool at one step, what it is used for, and how it came to be so."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import formatting
from app.components import (
    figures,
    kv_cache_controls,
    kv_cache_map,
    kv_cache_source,
    kv_cache_text,
    kv_cache_waste,
    links,
    notes,
)
from app.components.activity import polled
from app.components.bars import Share, share_bar
from app.components.kv_cache_source import STEP, Source
from app.components.kv_cache_steps import usage
from app.components.kv_cache_waste_chart import parts_of
from app.components.live_panel import POLL_S
from app.services import Services
from backend.analysis.kv_size import count_of
from backend.errors import DatabaseError
from backend.metrics.kv_use import KVPool, KVUse, kv_use
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.step_words import step_sentences
from db.run_rows import Run

_SHORT_TABLE = 12
_EXPLANATION = """
KV blocks are the units in which a request's keys and values are stored; a block holds as many tokens as its size says. A
request takes a block when its tokens reach it, wherever one is free, and its block table says where. Full blocks are known
by a hash over all tokens up to their end, so a request that begins like another one takes over its blocks and raises their
reference count instead of computing them again. Blocks that nobody holds keep what they hold and are evictable, until there
are no free ones left; when there is nothing to evict either, a running request is preempted and computed again later. The map
is put together from the events in the run's step ledger: each cell is the block of that number in the pool. In the paged
layout only the last of a request's blocks is not full:

$$\\text{unused slots} = \\text{block size} \\cdot \\lceil \\text{tokens} / \\text{block size} \\rceil - \\text{tokens}$$

There any free block suits any request, so no free slot is ever out of reach: external fragmentation is 0 by construction. The
contiguous layout gives each request a piece of the pool that holds the longest one. What is left over once the pool is cut
into such pieces is free, and no request can get it:

$$\\text{unusable slots} = \\text{block size} \\cdot (\\text{free blocks} \\bmod \\text{blocks of a piece})$$

Over a run, a step counts by the slots that were held in it:

$$\\text{waste} = \\sum_{\\text{steps}} \\text{wasted slots} \\Big/ \\sum_{\\text{steps}} \\text{held slots}$$

Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, sections 3.1 and 4.
"""


def show(services: Services, run: Run) -> None:
    if not run.is_final and kv_cache_controls.follow():
        kv_cache_source.write_address(run.run_id, None)
        polled(
            lambda: services.repository.get(run.run_id),
            lambda now: now is not None and not now.is_final,
            lambda now: _follow(services, now),
            POLL_S,
        )
        return
    source = _source(services, run)
    if source is None:
        kv_cache_source.write_address(run.run_id, None)
        return
    number = kv_cache_controls.step(source)
    kv_cache_source.write_address(run.run_id, number)
    _step(services, source, number, run)


def explanation() -> None:
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def _follow(services: Services, run: Run | None) -> None:
    """The newest step, kept as the one to stay at when the run is not followed any more."""
    if run is None:
        st.error("This run has been deleted.")
        return
    source = _source(services, run)
    if source is None:
        return
    number = source.steps[-1]
    st.session_state[STEP] = number
    _step(services, source, number, run)


def _source(services: Services, run: Run) -> Source | None:
    """What there is to show, or None and in words why there is nothing."""
    try:
        source = kv_cache_source.load(services, run)
    except DatabaseError as error:
        text = f"The blocks of run #{run.run_id} cannot be shown: {error}."
        st.error(notes.plain(text), icon=":material/broken_image:")
        return None
    if source is None:
        _nothing(run)
    elif source.history.gaps:
        text = f"The step ledger of run #{run.run_id} is damaged: {'; '.join(source.history.gaps)}."
        st.warning(notes.plain(text), icon=":material/warning:")
    return source


def _nothing(run: Run) -> None:
    if run.is_final:
        st.info(f"Run #{run.run_id} has no step ledger, so there are no blocks to show.", icon=":material/grid_off:")
    else:
        st.info(
            f"Run #{run.run_id} is {run.status}; its blocks appear here with its first steps.",
            icon=":material/hourglass_empty:",
        )


def _step(services: Services, source: Source, number: int, run: Run) -> None:
    try:
        moment = source.history.at(number)
    except DatabaseError as error:
        st.error(
            notes.plain(f"The blocks in step {number:,} cannot be shown: {error}."), icon=":material/broken_image:"
        )
        st.vega_lite_chart(*usage(source.rows, number))
        kv_cache_waste.show(services, run, number)
        _raw(source, number)
        return
    if moment is None:
        st.info(
            f"The step ledger of run #{source.run_id} was written before it held block events, so its blocks are not known.",
            icon=":material/grid_off:",
        )
        return
    assert run.resolved_config is not None
    assert run.load is not None
    pool = KVPool.of_run(run.resolved_config, run.load.get("model", {}), source.num_blocks)
    scheduled = {entry.request_id: entry.num_scheduled_tokens for entry in moment.step.entries}
    use = kv_use(moment.blocks, moment.num_tokens, source.block_size, pool, scheduled)
    _figures(source, use, moment.blocks.counts(source.num_blocks), len(moment.blocks.cached))
    st.markdown(f"**{kv_cache_controls.describe(source, number)}**")
    with st.grid(3, min_column_width=260, gap=("small", "medium")) as grid:
        with grid.cell(column_span=2):
            kv_cache_map.show(moment, use, source.num_blocks, kv_cache_text.asked(services, run, moment, use))
        with st.container():
            _sentences(moment.step)
            _slots(use)
            st.vega_lite_chart(*usage(source.rows, number))
    kv_cache_waste.show(services, run, number)
    _requests(use)
    _raw(source, number)


def _raw(source: Source, number: int) -> None:
    with st.expander("Raw data", icon=":material/data_object:"):
        st.caption("This step as JSON, with the blocks that each request holds:")
        st.code(f"servelab runs ledger {source.run_id} --first {number} --last {number} --blocks", language="shell")
        links.detail_link(source.run_id)


def _figures(source: Source, use: KVUse, counts: tuple[int, int, int], num_cached: int) -> None:
    referenced, evictable, free = counts
    total = count_of(source.num_blocks, "block")
    with figures.row():
        figures.figure(
            "KV in use",
            formatting.percent(referenced / source.num_blocks),
            "Referenced / usable blocks: those that a request holds now.",
            count_of(referenced, "block"),
        )
        figures.figure(
            "Evictable",
            formatting.count(evictable),
            "Cached blocks without a holder: a later request may find them, or they make room.",
            f"{formatting.count(num_cached)} cached in all",
        )
        unusable = use.num_unusable_slots // use.block_size
        figures.figure(
            "Free",
            formatting.count(free),
            "Blocks that hold nothing anybody wants.",
            f"of {total}" + (f", {formatting.count(unusable)} unusable" if unusable else ""),
        )
        figures.figure(
            "Saved by sharing",
            formatting.percent(use.saved_share),
            "Sum of reference counts minus distinct blocks, as a share of that sum: what requests would hold more without "
            "sharing.",
            count_of(use.num_saved_blocks, "block"),
        )
        figures.figure(
            "Unused slots",
            formatting.percent(use.wasted_share),
            "Slots (of a token each) in held blocks that hold no token, or one that is behind the window, of all slots in "
            "held blocks.",
            count_of(use.num_wasted_slots, "slot"),
        )


def _sentences(step: LedgerStep) -> None:
    st.markdown("**In this step**")
    sentences = step_sentences(step, kv_cache_map.request_name)
    st.markdown("\n".join(f"- {notes.plain(sentence)}" for sentence in sentences))


def _slots(use: KVUse) -> None:
    """Where the slots of held blocks go, and with them those that nobody can hold."""
    total = use.num_slots + use.num_unusable_slots
    if not total:
        return
    shares = [Share(label, amount, formatting.count(amount), colour) for label, amount, colour in parts_of(use)]
    title = "Slots in held blocks and unusable ones" if use.num_unusable_slots else "Slots in held blocks"
    share_bar(title, shares, formatting.count(total))
    if use.num_unknown:
        st.caption(
            f"{count_of(use.num_unknown, 'request')} began before the ledger; their slots count as used, since their tokens "
            "are not known."
        )


def _requests(use: KVUse) -> None:
    with st.expander(
        f"Requests that hold blocks ({formatting.count(len(use.requests))})", icon=":material/table_rows:"
    ):
        if not use.requests:
            st.caption("None in this step.")
            return
        rows = [
            {
                "Request": kv_cache_map.request_name(request_id),
                "Blocks": part.num_blocks,
                "Shared blocks": part.num_shared,
                "Tokens": part.num_tokens,
                "Unused slots": part.num_unused_slots,
                "Slots in empty blocks": part.num_reserved_slots,
            }
            for request_id, part in use.requests.items()
        ]
        st.dataframe(
            pd.DataFrame(rows),
            hide_index=True,
            lazy=False,
            height="content" if len(rows) <= _SHORT_TABLE else 440,
            placeholder=formatting.NONE,
            key="kv-requests",
        )
