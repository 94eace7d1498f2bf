"""A window counts the token itself, in whatever way a prompt is run (huggingface/transformers#39408, LightLLM#1311).

Prefill and decode are two kernels here, and both have a plain-torch reference: one of the four alone may be off by one,
cut a window to whole blocks, or leave it out, and no prompt shorter than the window shows it. Equal scores and one-hot
values show the weight of each position: of row i, 1 / min(i + 1, W) for exactly the positions max(0, i - W + 1) .. i.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops.paged_attention import paged_attention
from kernels.ops.paged_decode_attention import Cut, paged_decode_attention
from kernels.reference.paged_attention import paged_attention as prefill_reference
from kernels.reference.paged_decode_attention import paged_decode_attention as decode_reference
from tests.kernels.oracle import chunked, start_loc

HEAD_DIM = 80  # positions that a one-hot value tells apart


def assert_weights(output: Tensor, expected: Tensor) -> None:
    for head in output.unbind(1):
        torch.testing.assert_close(head, expected)
        assert torch.equal(head != 0, expected != 0)


@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (8, 1), (8, 16), (17, 16)])
def test_all_ways_to_run_a_prompt_see_the_same_window(window: int, block_size: int, device: torch.device) -> None:
    """At once, in chunks of 5, and token by token, each length from 1 to beyond three windows."""
    length = 3 * window + 5
    num_blocks = -(-length // block_size)
    block_ids = 1 + torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(length, device=device)
    key_cache = torch.randn(num_blocks + 1, block_size, 1, HEAD_DIM, device=device)
    value_cache = torch.full_like(key_cache, torch.nan)
    value_cache[block_ids[positions // block_size], positions % block_size, 0] = torch.eye(HEAD_DIM, device=device)[
        :length
    ]
    query = torch.zeros(length, 2, HEAD_DIM, device=device)
    distance = positions[:, None] - torch.arange(HEAD_DIM, device=device)
    seen = (distance >= 0) & (distance < window)
    expected = seen / seen.sum(1, keepdim=True)

    def table(num_reqs: int) -> Tensor:
        return block_ids.int().expand(num_reqs, -1).contiguous()

    for chunk in (length, 5):
        query_lens, ends = chunked(length, chunk)
        seq_lens = torch.tensor(ends, dtype=torch.int32, device=device)
        batch = (query, key_cache, value_cache, table(len(ends)), start_loc(query_lens, device), seq_lens)
        for attend in (paged_attention, prefill_reference):
            assert_weights(attend(*batch, scale=1.0, window=window), expected)
    one_row_each = (query, key_cache, value_cache, table(length), positions.int() + 1)
    for cut in (Cut(1, 64, 64, 4), Cut(4, 16, 16, 4)):
        assert_weights(paged_decode_attention(*one_row_each, scale=1.0, window=window, cut=cut), expected)
    assert_weights(decode_reference(*one_row_each, scale=1.0, window=window), expected)
