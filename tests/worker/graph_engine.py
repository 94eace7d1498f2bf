"""A tiny decoder on CUDA, with its graphs over one set of caches and without them over another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from backend.attention.metadata import LayerCache
from backend.core.output import SchedulerOutput
from backend.models.decoder import Decoder
from backend.models.dummy import DUMMY_SHAPES
from backend.worker.input_batch import InputBatch
from backend.worker.step_tensors import HostBuffers, to_device
from kernels.reference.greedy_tokens import greedy_tokens
from kernels.reference.record_tokens import record_tokens
from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.attention.triton import TritonAttention  # noqa: E402
from backend.models.triton_decoder import TritonDecoder  # noqa: E402
from backend.worker import decode_graphs, graph_sizes  # noqa: E402
from backend.worker.decode_graphs import DecodeGraphs  # noqa: E402
from backend.worker.draw_graphs import DrawGraphs  # noqa: E402
from backend.worker.mixed_graphs import MixedGraphs  # noqa: E402

DEVICE = torch.device("cuda")
MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE, SHORT_CONTEXT, MAX_NUM_TOKENS = 20, 64, 4, 16, 40
NUM_BLOCKS = MAX_NUM_REQS * MAX_MODEL_LEN // BLOCK_SIZE
MIXED_SIZES = (8, 32)
CONFIG = replace(DUMMY_SHAPES["tiny"], vocab_size=128, num_layers=2, max_position_embeddings=MAX_MODEL_LEN)


@dataclass
class Engine:
    """A decoder with graphs over one set of caches, and without them over another."""

    decoder: TritonDecoder
    attention: TritonAttention
    batch_invariant: bool
    graphs: DecodeGraphs
    mixed_graphs: MixedGraphs
    buffers: HostBuffers
    graph_caches: list[LayerCache]
    eager_caches: list[LayerCache]
    graph_token_ids: Tensor  # the last one of each row, and of the padding's
    eager_token_ids: Tensor

    def run_eagerly(self, batch: InputBatch, scheduled: SchedulerOutput) -> tuple[Tensor, Tensor]:
        """Logits and outcomes."""
        batch.update(scheduled)
        tensors = to_device(batch.build(scheduled), self.buffers, DEVICE)
        hidden = self.decoder.forward(
            tensors.token_ids,
            tensors.token_rows,
            self.eager_token_ids,
            self.eager_caches,
            tensors.metadata,
            self.attention,
        )
        logits = self.decoder.compute_logits(hidden[tensors.logits_indices])
        return logits, record_tokens(*greedy_tokens(logits), tensors.sampled_rows, self.eager_token_ids)

    def fill_caches(self) -> None:
        """Random values, the same ones in both sets; the null block is NaN, which nobody may read."""
        torch.manual_seed(1)
        for ours, other in zip(self.graph_caches, self.eager_caches, strict=True):
            for name in ("key_cache", "value_cache"):
                values = torch.randn(getattr(ours, name).shape)
                values[0] = torch.nan
                getattr(ours, name).copy_(values)
                getattr(other, name).copy_(values)


def make_engine(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(decode_graphs, "SHORT_CONTEXT", SHORT_CONTEXT)
    monkeypatch.setattr(graph_sizes, "SIZES", MIXED_SIZES)
    monkeypatch.setattr(graph_sizes, "LARGE_SIZES", (MAX_NUM_TOKENS,))
    model = Decoder(CONFIG, dtype=torch.float32, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        parameter.mul_(0.2).add_(1) if name.endswith("norm.weight") else parameter.mul_(parameter.shape[-1] ** -0.5)
    caches = [
        [
            LayerCache.zeros(NUM_BLOCKS, BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim, torch.float32, DEVICE)
            for _ in range(CONFIG.num_layers)
        ]
        for _ in range(2)
    ]
    token_ids = [torch.zeros(MAX_NUM_REQS + 1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    decoder, attention = TritonDecoder(model, batch_invariant=batch_invariant), TritonAttention(batch_invariant)
    logits = torch.empty(MAX_NUM_REQS, CONFIG.vocab_size, device=DEVICE)
    parts = (decoder, attention, caches[0], token_ids[0], logits)
    max_num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
    graphs = DecodeGraphs(
        *parts,
        max_num_reqs=MAX_NUM_REQS,
        max_num_blocks=max_num_blocks,
        block_size=BLOCK_SIZE,
        draws=DrawGraphs(logits, token_ids[0]),
    )
    mixed = MixedGraphs(*parts, max_num_tokens=MAX_NUM_TOKENS, max_num_reqs=MAX_NUM_REQS, max_num_blocks=max_num_blocks)
    pool, captured = torch.cuda.graph_pool_handle(), []
    mixed.capture(pool, lambda: captured.append("mixed"))
    graphs.capture(pool, lambda: captured.append("decode"))
    assert captured == ["mixed"] * len(mixed) + ["decode"] * len(graphs)
    buffers = HostBuffers(DEVICE)
    return Engine(
        decoder, attention, batch_invariant, graphs, mixed, buffers, caches[0], caches[1], token_ids[0], token_ids[1]
    )


def same(engine: Engine, ours: Tensor, expected: Tensor) -> None:
    """Bit for bit, where sums do not depend on the size of the batch."""
    tolerance = 0 if engine.batch_invariant else 1e-4
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def check_caches(engine: Engine, written: set[int], *, has_padding: bool) -> None:
    """What was written is what eager steps write; the rest is as it was, but for the padding's slot."""
    after = [(cache.key_cache.clone(), cache.value_cache.clone()) for cache in engine.graph_caches]
    eager = [(cache.key_cache.clone(), cache.value_cache.clone()) for cache in engine.eager_caches]
    engine.fill_caches()
    before = [(cache.key_cache, cache.value_cache) for cache in engine.graph_caches]
    slots = torch.zeros((NUM_BLOCKS + 1) * BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
    slots[list(written)] = True
    for layer in zip(after, eager, before, strict=True):
        for ours, expected, untouched in zip(*layer, strict=True):
            ours, expected, untouched = (cache.flatten(0, 1) for cache in (ours, expected, untouched))
            same(engine, ours[slots], expected[slots])
            assert torch.equal(ours[~slots][BLOCK_SIZE:], untouched[~slots][BLOCK_SIZE:])
            assert ours[1:BLOCK_SIZE].isnan().all()
            assert ours[0].isfinite().all() if has_padding else ours[0].isnan().all()
