"""Head sizes that are no power of two, and numbers of query heads per KV head that are odd, one, or above a tile's 16 rows.

Tiles are powers of two, so what pads them has to be masked in every load and store: the last columns of heads of 80, 96 and
192, the last rows of groups of 3 and 7 (sgl-project/sglang#1281, vllm-project/vllm#23424). Everything that writes or reads
the cache goes through all of them, between bands of NaN and with NaN in each slot that holds no token.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.ops.paged_attention import paged_attention
from kernels.ops.paged_decode_attention import Cut, paged_decode_attention
from kernels.ops.rotary_and_store import rotary_and_store
from kernels.ops.store_kv_cache import store_kv_cache
from kernels.registry import REGISTRY
from tests.kernels.oracle import HEAD_DIMS, HEADS, GuardBands, bfloat16_with, naive_attention, start_loc

# Each head size and each ratio, and the awkward ones with one another; on a GPU all pairs.
SOME_SHAPES = [(64, 9, 3), (80, 14, 2), (96, 12, 4), (128, 24, 1), (192, 9, 3), (256, 1, 1)]
SOME_SHAPES += [(80, 9, 3), (192, 14, 2)]
ALL_SHAPES = [(head_dim, *heads) for head_dim in HEAD_DIMS for heads in HEADS]
SHAPES = [*((torch.float32, *shape) for shape in SOME_SHAPES), *bfloat16_with(ALL_SHAPES)]
BLOCK_SIZE, NUM_TOKENS = 16, 21
BLOCK_IDS = [3, 1]  # of four: the null block and somebody else's are not the request's
LENGTHS = [1, 15, 16, 17, NUM_TOKENS]  # around the end of a block
QUERY_LENS = [1, 7, 5, 1, NUM_TOKENS]  # a decode, the end of a prompt, a verification of 5, a decode, a whole prompt


@dataclass
class Request:
    """One request's queries, keys and values, [num_tokens, heads, head_dim], and its slots, between bands of NaN."""

    qkv: Tensor
    num_heads: int
    query: Tensor
    key: Tensor
    value: Tensor
    slots: Tensor
    bands: GuardBands

    def empty_cache(self) -> Tensor:
        shape = (4, BLOCK_SIZE, *self.key.shape[1:])
        return self.bands.wrap(torch.full(shape, torch.nan, dtype=self.key.dtype, device=self.key.device))

    def cache_of(self, tensor: Tensor) -> Tensor:
        """What a cache should hold, by torch's own indexing."""
        cache = self.empty_cache()
        cache.view(-1, *tensor.shape[1:])[self.slots] = tensor
        return cache


def make_request(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, device: torch.device) -> Request:
    bands = GuardBands()
    shape = (NUM_TOKENS, (num_heads + 2 * num_kv_heads) * head_dim)
    qkv = bands.wrap(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype))
    query, key, value = qkv.view(NUM_TOKENS, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    positions = torch.arange(NUM_TOKENS, device=device)
    slots = torch.tensor(BLOCK_IDS, device=device)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Request(qkv, num_heads, query, key, value, slots, bands)


@pytest.mark.parametrize(("dtype", "head_dim", "num_heads", "num_kv_heads"), SHAPES)
def test_what_is_written(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    """With and without a rotation on the way, which is by an angle of zero here."""
    request = make_request(dtype, head_dim, num_heads, num_kv_heads, device)
    caches, rotated_caches = ([request.empty_cache() for _ in range(2)] for _ in range(2))
    store_kv_cache(request.key, request.value, *caches, request.slots)
    no_angle = torch.tensor([1.0, 0.0], device=device).repeat_interleave(head_dim // 2).expand(NUM_TOKENS, -1)
    positions = torch.arange(NUM_TOKENS, device=device)
    query = rotary_and_store(
        request.qkv, positions, request.bands.wrap(no_angle), *rotated_caches, request.slots, num_heads
    )
    assert torch.equal(query, request.query)
    expected = [request.cache_of(tensor) for tensor in (request.key, request.value)]
    for ours, wanted in zip((*caches, *rotated_caches), (*expected, *expected), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)
    request.bands.assert_untouched()


@pytest.mark.parametrize(("dtype", "head_dim", "num_heads", "num_kv_heads"), SHAPES)
def test_what_is_attended_to(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    """Prompts, chunks, verifications and decodes, by both kernels and by shares of a request that are joined."""
    request = make_request(dtype, head_dim, num_heads, num_kv_heads, device)
    key_cache, value_cache = (request.cache_of(tensor) for tensor in (request.key, request.value))
    rows = [request.query[end - count : end] for end, count in zip(LENGTHS, QUERY_LENS, strict=True)]
    query_start_loc = start_loc(QUERY_LENS, device)
    table = torch.tensor([BLOCK_IDS] * len(LENGTHS), dtype=torch.int32, device=device)
    seq_lens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    query, scale = request.bands.wrap(torch.cat(rows)), head_dim**-0.5
    expected = naive_attention(query, key_cache, value_cache, table, query_start_loc, seq_lens, scale).to(device, dtype)

    tolerance = REGISTRY["paged_attention"].tolerances[dtype]
    tolerances = {"atol": tolerance.atol, "rtol": tolerance.rtol}
    output = request.bands.empty(query.shape, dtype=dtype, device=device)
    paged_attention(query, key_cache, value_cache, table, query_start_loc, seq_lens, scale, output=output)
    torch.testing.assert_close(output, expected, **tolerances)
    last = query_start_loc[1:].long() - 1
    for cut in (None, Cut(2, 16, 16, 4)):
        output = request.bands.empty(query[last].shape, dtype=dtype, device=device)
        last_rows = request.bands.wrap(query[last])
        paged_decode_attention(last_rows, key_cache, value_cache, table, seq_lens, scale, output=output, cut=cut)
        torch.testing.assert_close(output, expected[last], **tolerances)
    request.bands.assert_untouched()
