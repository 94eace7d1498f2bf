"""How a launch of `paged_attention` is cut. Not an op: host-side sizes only."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

MAX_SPLITS = 16
MAX_SHORT_SPLITS = 8  # of short tiles, but for contexts of more than LONG_CONTEXT tokens: more take longer to add up
LONG_CONTEXT = 8192
MIN_KEYS = 512  # of a share: of many rows, shorter ones take as long to add up as to attend to
SHORT_MIN_KEYS = 128  # of the few rows of a draft
FEW_TOKENS = 8  # of a request: a draft and what it stands behind
FEW_REQS = 4
TREE_TOKENS = 32
# Of short tiles, programs per multiprocessor: each waits for its loads, and so many hide each other's.
PROGRAMS_PER_SM = 4


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
    # Of what was tried on an H100 or H200 in bfloat16, the fastest at head_dim 64 and 128.
    if num_reqs < num_tokens <= FEW_TOKENS * num_reqs and row_bytes <= 256:
        # It waits for the latency of a share, as a decode does.
        block_n, num_stages, min_keys = 128 if row_bytes <= 128 else 64, 2, SHORT_MIN_KEYS
        if row_bytes == 256 and num_reqs > FEW_REQS:
            block_m = max(block_m, 32)  # so that a draft's rows share the keys they read
    elif num_reqs < num_tokens <= TREE_TOKENS * num_reqs and row_bytes <= 128:
        block_n, num_stages, min_keys = 128, 2, SHORT_MIN_KEYS
        if num_reqs > FEW_REQS:
            block_m = max(block_m, 64)
    elif num_tokens > 4 * num_reqs:
        if row_bytes <= 128:
            block_m, block_n, num_stages = max(block_m, 64), 128, 2
        elif row_bytes == 256:
            # Prompts short and long.
            block_m = max(block_m, 128)
            block_n, num_warps, num_stages = (32, 4, 4) if num_tokens <= 1536 * num_reqs else (64, 8, 2)
        else:
            block_m = max(block_m, 64 if row_bytes <= 512 else 32)
    return TileSizes(block_m // group, block_m, block_n, block_d, num_warps, num_stages, min_keys)


def choose_num_splits(num_programs: int, max_seq_len: int, min_keys: int, device: torch.device) -> int:
    """Into how many shares the keys of a tile are cut, so that a few rows behind a long context fill the device.

    Args:
        num_programs: tiles times KV heads.
        max_seq_len: what a block table can hold, in tokens.
        min_keys: of a share.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    is_short = min_keys < MIN_KEYS
    splits = PROGRAMS_PER_SM * num_sms / num_programs if is_short else num_sms // num_programs
    most = MAX_SHORT_SPLITS if is_short and max_seq_len <= LONG_CONTEXT else MAX_SPLITS
    splits = min(splits, max_seq_len // min_keys, most)
    if splits <= 1:
        return 1
    return 1 << (round(math.log2(splits)) if is_short else int(math.log2(splits)))
