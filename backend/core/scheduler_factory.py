"""From a config to the scheduler it asks for: the one place where policy, batching and KV layout are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from backend.config import EngineConfig
from backend.core.admission import ContinuousBatching, StaticBatching
from backend.core.block_hash import BlockHash
from backend.core.draft_cost import DraftCost
from backend.core.draft_length import AdaptiveLength
from backend.core.kv_cache_manager import KVCacheManager
from backend.core.kv_groups import KVGroupSpec
from backend.core.kv_layouts import ContiguousKVCacheManager
from backend.core.policies import FirstComeFirstServed, PrefillFirst, Priority
from backend.core.recompute_scheduler import RecomputeScheduler
from backend.core.scheduler import Scheduler
from backend.core.speculation import HEAD_METHODS, LOOK_UP_METHODS
from backend.core.speculative_scheduler import MAX_TREE_REQS, SpeculativeScheduler
from backend.core.swapping import SwappingKVCacheManager, num_host_blocks
from backend.errors import EngineError

_POLICIES = {"fcfs": FirstComeFirstServed, "prefill_first": PrefillFirst, "priority": Priority}
_BATCHINGS = {"continuous": ContinuousBatching, "static": StaticBatching}


def make_scheduler(
    config: EngineConfig,
    kv_groups: Sequence[KVGroupSpec],
    prefix_key: BlockHash | None = None,
    draft_cost: DraftCost | None = None,
) -> Scheduler:
    """A scheduler and its pool.

    Args:
        config: fully resolved.
        kv_groups: shapes of the model's KV.
        prefix_key: of the prefix cache, see `KVCacheManager`; None when there is none. Only the paged layout has one.
        draft_cost: what speculation costs on this machine; None: a CPU's, of drafts that cost nothing.

    Raises:
        EngineError: `config` has gaps.
    """
    cache, settings, length = config.cache, config.scheduler, config.model.max_model_len
    if cache.num_blocks is None or settings.max_num_seqs is None or settings.max_num_batched_tokens is None:
        raise EngineError("the engine needs a resolved config: cache.num_blocks or scheduler.* is not filled in")
    if length is None:
        raise EngineError("the engine needs a resolved config: model.max_model_len is not filled in")
    if cache.layout == "contiguous":
        manager = ContiguousKVCacheManager(cache.num_blocks, cache.block_size, kv_groups, length)
    else:
        key = prefix_key if cache.layout == "paged" else None
        parts = (cache.num_blocks, cache.block_size, kv_groups, key)
        budget, num_host = settings.max_num_batched_tokens, num_host_blocks(config, kv_groups)
        if num_host:
            manager = SwappingKVCacheManager(*parts, num_host, max_num_batched_tokens=budget)
        else:
            manager = KVCacheManager(*parts, max_num_batched_tokens=budget)
    scheduler_class = RecomputeScheduler if cache.layout == "none" else Scheduler
    if config.speculative.method != "none":
        speculative = config.speculative
        tree, cost = speculative.draft_tree, draft_cost or DraftCost()
        most = tree.depth if tree else speculative.num_speculative_tokens
        num_nodes = tree.num_drafted_to if tree else None
        has_graphs, max_batch = not config.kernels.enforce_eager, speculative.max_batch
        if tree and has_graphs and speculative.adaptive:
            max_batch = min(max_batch or MAX_TREE_REQS, MAX_TREE_REQS)
        scheduler_class = partial(
            SpeculativeScheduler,
            num_speculative_tokens=most,
            length=AdaptiveLength(most, cost, num_nodes) if speculative.adaptive else None,
            max_batch=max_batch,
            num_window_tokens=speculative.num_window_tokens,
            only_in_graphs=cost.only_in_graphs,
            drafts_ahead=speculative.method in HEAD_METHODS and has_graphs,
            looks_up=speculative.method in LOOK_UP_METHODS and has_graphs,
            num_nodes=num_nodes,
        )
    return scheduler_class(
        manager,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=length,
        policy=_POLICIES[settings.policy](),
        batching=_BATCHINGS[settings.batching](),
    )
