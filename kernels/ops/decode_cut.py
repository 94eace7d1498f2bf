"""How a launch of `paged_decode_attention` is cut. Not an op: host-side sizes only."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Programs per multiprocessor: of long contexts so many keep its loads in flight, and more only split what the last of a
# request adds up again; of others a multiprocessor holds about that, and uneven requests want some to wait.
LONG_PROGRAMS_PER_SM = 4
PROGRAMS_PER_SM = 9
MAX_SPLITS = 64
MAX_TEAM = 8  # shares that one program adds up
LONG_CONTEXT = 8192


class Cut(NamedTuple):
    """How a launch is cut: a request's keys into `num_splits` shares at most, none below `min_keys`."""

    num_splits: int  # power of two up to MAX_TEAM, or a multiple of it
    min_keys: int
    block_n: int  # keys per iteration, power of two from 16
    num_warps: int
    num_stages: int = 2  # iterations under way: the loads of one hide behind the products of another


def choose_cut(num_rows: int, max_seq_len: int, head_dim: int, device: torch.device) -> Cut:
    """Choose by host-side sizes only: `num_rows` are requests times KV heads, `max_seq_len` what a block table can hold.

    Few rows are split over the whole device: into short shares while contexts are short, which is where a step waits for
    the latency of a single share, into as many as run at once where contexts are long, which is where bandwidth counts.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    is_long = max_seq_len > LONG_CONTEXT and num_rows < 2 * num_sms
    programs = (LONG_PROGRAMS_PER_SM if is_long else PROGRAMS_PER_SM) * num_sms
    splits = min(programs / num_rows, max_seq_len / 64, MAX_SPLITS)
    num_splits = 2 ** max(0, round(math.log2(splits)))
    min_keys = 128 if is_long or num_rows >= 2 * num_sms else 64
    return Cut(num_splits, min_keys, 32 if head_dim > 128 else 64, 4)
