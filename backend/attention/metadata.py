"""What attention needs to know of a batch, and where a layer's keys and values are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch: `num_tokens` query rows of `num_reqs` requests, laid end to end, single rows before chunks."""

    query_start_loc: Tensor  # int32 [num_reqs + 1], leading 0
    seq_lens: Tensor  # int32 [num_reqs], computed + scheduled
    block_table: Tensor  # int32 [num_reqs, max_num_blocks], logical -> physical
    slot_mapping: Tensor  # int64 [num_tokens], block_id * block_size + offset
    positions: Tensor  # int64 [num_tokens]
    num_decodes: int  # leading requests with a single query row

    @cached_property
    def chunk_start_loc(self) -> Tensor:
        """int32 [num_reqs - num_decodes + 1], leading 0: `query_start_loc` of the requests behind the single rows."""
        if self.num_decodes == 0:
            return self.query_start_loc  # the tensor itself, which a CUDA graph reads anew at each replay
        return self.query_start_loc[self.num_decodes :] - self.num_decodes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's part of the paged KV cache. Block 0 is the null block."""

    key_cache: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    value_cache: Tensor  # same

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerCache:
        """Room for `num_blocks` blocks and the null block.

        Zeros, not garbage: a masked position contributes 0 x value, and 0 x NaN is NaN.
        """
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
