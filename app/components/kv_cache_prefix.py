"""What the prefix cache did in a run: what was shared as a tree, and why a request was not found."""

from __future__ import annotations

import streamlit as st

from app import formatting
from app.components import (
    figures,
    kv_cache_earlier,
    kv_cache_prefix_request,
    kv_cache_prefix_source,
    kv_cache_source,
    links,
    notes,
)
from app.components.activity import polled
from app.components.bars import share_bar
from app.components.kv_cache_earlier import Earlier
from app.components.kv_cache_prefix_request import fate_shares, pieces
from app.components.kv_cache_prefix_source import Source, View
from app.components.kv_cache_prefix_tree import MAX_LEAVES, MAX_TABLE_ROWS, tree_picture, tree_table
from app.components.kv_cache_source import REQUEST
from app.components.run_settings import check_settings
from app.services import Services
from backend.analysis.kv_size import count_of
from backend.analysis.prefix_tree import TreeNode, folded, walk
from backend.errors import DatabaseError, ServeLabError
from db.run_rows import Run

_POLL_S = 2.0
_SHORT_TABLE = 12
_FIRST_TOKENS = 8  # of a node, in words
_EXPLANATION = """
Each prompt is cut into full blocks, and a block is known by a hash over all tokens up to its end. When a request is admitted,
its blocks are looked up one after the other, and the first that is not there ends the search: one token that differs early, a
date in a system prompt for instance, costs everything behind it. In the tree prompts that begin alike run together until they
part; a node is as wide as it has tokens and as high as requests go through it, so that areas are prompt tokens. A block may be
missing though it had been computed: it was evicted to make room, or it was not computed yet.

$$\\text{hit rate} = \\frac{\\text{prompt tokens found in the cache}}{\\text{prompt tokens looked up}}$$

Zheng et al. 2024, *SGLang: Efficient Execution of Structured Language Model Programs*, section 3 (RadixAttention).
"""


def show(services: Services, run: Run) -> None:
    if run.resolved_config and _is_damaged(run):
        kv_cache_source.write_address(run.run_id, None)
        return
    if run.resolved_config and not run.resolved_config["cache"].get("enable_prefix_caching"):
        st.info(
            f"Prefix caching was off in run #{run.run_id} (cache.enable_prefix_caching, or a layout that cannot share): every "
            "prompt token was computed, and no request could find another one's blocks.",
            icon=":material/block:",
        )
        kv_cache_source.write_address(run.run_id, None)
        return
    polled(
        lambda: services.repository.get(run.run_id),
        lambda now: now is not None and not now.is_final,
        lambda now: _whole(services, now),
        _POLL_S,
    )
    view = kv_cache_prefix_source.known(run.run_id)
    if view is not None:
        kv_cache_prefix_request.show(view)
        with st.expander("Raw data", icon=":material/data_object:"):
            st.caption("Every step as JSON, with the blocks that requests found, took and lost:")
            st.code(f"servelab runs ledger {run.run_id}", language="shell")
            links.detail_link(run.run_id)
    kv_cache_source.write_address(run.run_id, None, st.session_state.get(REQUEST))


def explanation() -> None:
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def _is_damaged(run: Run) -> bool:
    """Says why."""
    try:
        check_settings(run)
    except DatabaseError as error:
        text = f"What run #{run.run_id} shared cannot be told: {error}."
        st.error(notes.plain(text), icon=":material/broken_image:")
        return True
    return False


def _whole(services: Services, run: Run | None) -> None:
    if run is None:
        st.error("This run has been deleted.")
        return
    try:
        source = kv_cache_prefix_source.load(services, run)
    except ServeLabError as error:
        st.info(
            f"What run #{run.run_id} shared cannot be told: {notes.plain(str(error))}.",
            icon=":material/visibility_off:",
        )
        return
    if source is None or source.view is None:
        _nothing(run)
        return
    if source.reader.gaps:
        text = f"The step ledger of run #{run.run_id} is damaged: {'; '.join(source.reader.gaps)}."
        st.warning(notes.plain(text), icon=":material/warning:")
    _figures(source, source.view)
    if source.earlier is not None:
        _earlier(source.earlier, (run.cache_state or {}).get("num_cached_tokens", 0))
    share_bar(
        "Prompt tokens, by what became of them",
        fate_shares(source.view.sums),
        formatting.count(sum(source.view.sums.values())),
    )
    _tree(source.view)


def _nothing(run: Run) -> None:
    if run.is_final:
        st.info(
            f"Run #{run.run_id} has no step ledger with block events, so what it shared is not known.",
            icon=":material/grid_off:",
        )
    else:
        st.info(
            f"Run #{run.run_id} is {run.status}; what it shares appears here with its first steps.",
            icon=":material/hourglass_empty:",
        )


def _figures(source: Source, view: View) -> None:
    sums, hits = view.sums, [key for key in view.measured if view.cache.history.admissions[key].num_found]
    total = sum(sums.values())
    unknown = len(source.history.admissions) - len(view.cache.paths)
    with figures.row():
        figures.figure(
            "Hit rate",
            formatting.percent(sums["cached"] / total if total else None),
            "prefix_cache_hit_rate",
            f"of {formatting.count(total)} tokens",
        )
        figures.figure(
            "Saved",
            formatting.count(sums["cached"]),
            "Prompt tokens that came from the cache at a request's first admission, without the warm-up.",
            "tokens",
        )
        figures.figure(
            "Requests that hit",
            formatting.count(len(hits)),
            "Those that found at least one block.",
            f"of {formatting.count(len(view.measured))}",
        )
        figures.figure(
            "No longer there",
            formatting.count(sums["lost"]),
            "Prompt tokens in blocks that could be found once, or behind such a block: evicted to make room, or forgotten in "
            "a reset of the cache.",
            "tokens",
        )
        figures.figure(
            "Not computed yet",
            formatting.count(sums["pending"]),
            "Prompt tokens that another running request was about to compute when this one was admitted.",
            "tokens",
        )
    if unknown:
        st.caption(f"{count_of(unknown, 'request')} left out: the prompt is not known here, or not yet.")


def _earlier(earlier: Earlier, num_cached_tokens: int) -> None:
    """What a warm cache began with, and what is not known of it."""
    held = f"The run began with {formatting.quantity(num_cached_tokens, 'tokens')} in the cache"
    if earlier.tokens:
        known = kv_cache_earlier.run_names(earlier.run_ids)
        text = f"{held}, left by {known}: those prompts are compared as well."
    else:
        text = f"{held}, left by earlier runs whose prompts are not known here."
    st.caption(notes.plain(" ".join([text, *earlier.problems])))


def _tree(view: View) -> None:
    if not view.tree:
        st.caption("Only the warm-up has been admitted so far.")
        return

    def begins(node: TreeNode) -> str:
        if node.kind == "merged":
            return formatting.NONE
        ids = view.cache.tokens[node.first].prompt[node.start : node.start + _FIRST_TOKENS]
        texts = pieces([int(it) for it in ids], view.tokenizer)
        return (" " if all(text.isdecimal() for text in texts) else "").join(texts)

    drawn = folded(view.tree, MAX_LEAVES)
    st.vega_lite_chart(*tree_picture(drawn, begins, "Prefix tree: a node's area is its prompt tokens"))
    num_leaves = sum(not node.children for node in walk(view.tree))
    if num_leaves > MAX_LEAVES:
        st.caption(
            f"Of {formatting.count(num_leaves)} branches those that saved most are drawn one by one, the others together."
        )
    table, number = tree_table(view.tree, begins)
    with st.expander(f"Shared beginnings ({formatting.count(number)})", icon=":material/table_rows:"):
        if not number:
            st.caption("No two prompts have their first block in common.")
            return
        st.dataframe(
            table,
            hide_index=True,
            lazy=False,
            height="content" if len(table) <= _SHORT_TABLE else 440,
            placeholder=formatting.NONE,
            key="kv-prefix-table",
        )
        if number > MAX_TABLE_ROWS:
            st.caption(f"The {MAX_TABLE_ROWS} that saved most; {formatting.count(number - MAX_TABLE_ROWS)} more.")
