"""How a launch of `paged_attention` is cut. Not an op: host-side sizes only."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

MAX_SPLITS = 16
MIN_KEYS = 512  # of a share: of many rows, shorter ones take as long to add up as to attend to
FEW_TOKENS = 8  # of a request: a draft and what it stands behind
TREE_TOKENS = 32


class TileSizes(NamedTuple):
    """How a launch is cut: a program has `block_m` rows, which are `block_q` tokens times the heads of a group."""

    block_q: int
    block_m: int  # power of two; rows from block_q * group on are idle
    block_n: int  # keys per iteration, power of two
    block_d: int  # head_dim, padded to a power of two
    num_warps: int
    num_stages: int
    min_keys: int = MIN_KEYS  # of a share


def tile_sizes(num_tokens: int, num_reqs: int, group: int, head_dim: int, element_bytes: int) -> TileSizes:
    """Choose the tile by host-side sizes only: long rows of queries share the keys that a program loads."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    row_bytes = block_d * element_bytes
    # tl.dot wants 16 rows at least; a request with one query row fills no more than its group.
    block_m = max(16, triton.next_power_of_2(group))
    block_n, num_warps, num_stages = (64, 4, 3) if row_bytes <= 256 else (32, 4, 2)
    min_keys = MIN_KEYS
    if num_tokens > 4 * num_reqs:
        # Of what was tried on an H100 or H200 in bfloat16, the fastest at head_dim 64 and 128.
        is_short = num_tokens <= FEW_TOKENS * num_reqs
        if is_short and row_bytes <= 256:
            # It waits for the latency of a share, as a decode does.
            block_m = max(block_m, 16 if row_bytes <= 128 else 32)
            num_stages, min_keys = 2, 64
        elif row_bytes <= 128:
            block_n = 64 if num_tokens <= TREE_TOKENS * num_reqs else 128
            block_m, num_stages = max(block_m, 64), 2
        elif row_bytes == 256:
            # Prompts short and long.
            block_m = max(block_m, 128)
            block_n, num_warps, num_stages = (32, 4, 4) if num_tokens <= 1536 * num_reqs else (64, 8, 2)
        else:
            block_m = max(block_m, 64 if row_bytes <= 512 else 32)
    return TileSizes(block_m // group, block_m, block_n, block_d, num_warps, num_stages, min_keys)


def choose_num_splits(num_programs: int, max_seq_len: int, min_keys: int, device: torch.device) -> int:
    """Into how many shares the keys of a tile are cut, so that a short chunk behind a long context fills the device.

    Args:
        num_programs: tiles times KV heads.
        max_seq_len: what a block table can hold, in tokens.
        min_keys: of a share.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    splits = min(num_sms // num_programs, max_seq_len // min_keys, MAX_SPLITS)
    return 1 << max(0, splits.bit_length() - 1)
