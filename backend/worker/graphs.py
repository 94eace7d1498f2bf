"""The CUDA graphs of an engine: which there are, captured into one pool of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import LayerCache
from backend.config import EngineConfig
from backend.worker.decode_graphs import DecodeGraphs
from backend.worker.decoders import StepDecoder
from backend.worker.draw_graphs import DrawGraphs
from backend.worker.graph_pass import Keep
from backend.worker.mixed_graphs import MixedGraphs

# Steps of more requests are long enough to be launched op by op, and their logits would take memory from the KV cache.
MAX_NUM_REQS = 512


class GraphSet(Protocol):
    def __len__(self) -> int: ...

    def capture(self, pool: object, on_progress: Callable[[], None]) -> None:
        """Capture all; `on_progress` is called for each."""
        ...


def capture_graphs(
    config: EngineConfig,
    decoder: StepDecoder,
    attention: AttentionBackend,
    layer_caches: list[LayerCache],
    sampled_token_ids: Tensor,
    *,
    vocab_size: int,
    max_model_len: int,
    num_groups: int,
    num_logits: int,
    on_progress: Callable[[int, int], None],
    keep: Keep | None = None,
    has_trees: bool = False,
    more: Callable[[DecodeGraphs, MixedGraphs, Tensor], Sequence[GraphSet]] = lambda decode, mixed, logits: (),
) -> tuple[DecodeGraphs, MixedGraphs]:
    """Args:
    sampled_token_ids: int64 [max_num_seqs + 1].
    max_model_len: longest request, in tokens.
    num_groups: KV groups of the model.
    num_logits: rows of logits that a step may want beyond one for each request.
    on_progress: gets graphs done and in all.
    keep: what is to be kept of each pass of the model; None: nothing.
    has_trees: whether rows of mixed steps may be nodes of trees.
    more: gets those graphs and where all leave their logits, float32 [num_rows, vocab_size]; further ones, captured behind them.
    """
    scheduler, block_size = config.scheduler, config.cache.block_size
    assert scheduler.max_num_seqs is not None
    assert scheduler.max_num_batched_tokens is not None
    max_num_blocks = -(-max_model_len // block_size)
    max_num_reqs = min(scheduler.max_num_seqs, MAX_NUM_REQS)
    # Graphs never run at the same time: they share what they write.
    num_rows = max(max_num_reqs, num_logits)
    logits = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=sampled_token_ids.device)
    parts = (decoder, attention, layer_caches, sampled_token_ids, logits)
    mixed = MixedGraphs(
        *parts,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_reqs=max_num_reqs,
        max_num_blocks=max_num_blocks,
        num_groups=num_groups,
        keep=keep,
        has_trees=has_trees,
    )
    decode = DecodeGraphs(
        *parts,
        max_num_reqs=max_num_reqs,
        max_num_blocks=max_num_blocks,
        block_size=block_size,
        num_groups=num_groups,
        draws=DrawGraphs(logits[:max_num_reqs], sampled_token_ids),
        keep=keep,
    )
    sets: list[GraphSet] = [mixed, decode, *more(decode, mixed, logits)]
    done, total = 0, sum(map(len, sets))

    def one_more() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    pool = torch.cuda.graph_pool_handle()
    for graphs in sets:
        graphs.capture(pool, one_more)
    return decode, mixed
