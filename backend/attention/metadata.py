"""What attention needs to know of a batch, and where a layer's keys and values are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from backend.core.kv_format import PLAIN, KVFormat
from kernels.reference.kv_quantization import DTYPES


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch: `num_tokens` query rows of `num_reqs` requests, laid end to end, single rows before chunks."""

    query_start_loc: Tensor  # int32 [num_reqs + 1], leading 0
    seq_lens: Tensor  # int32 [num_reqs], computed + scheduled
    block_table: Tensor  # int32 [num_reqs, max_num_blocks], logical -> physical
    slot_mapping: Tensor  # int64 [num_tokens], block_id * block_size + offset
    positions: Tensor  # int64 [num_tokens]
    num_decodes: int  # leading requests with a single query row, which is no node of a tree
    longest_chunk: int | None = None  # most rows of one of the other requests, where the host knows; None: it does not
    # The same of the KV groups behind the first one, which have block tables and slots of their own.
    other_groups: tuple[AttentionMetadata, ...] = ()
    # Rows that are nodes of a tree of drafts, as `paged_attention` takes them. Slots are one behind the other, and siblings
    # share a position.
    tree_mask: Tensor | None = (
        None  # int64 [num_tokens], bits of the row and its ancestors; -1: a request without a tree
    )
    tree_starts: Tensor | None = None  # int32 [num_reqs], the place of the node of bit 0; None: there are no trees

    def with_trees(self, tree_mask: Tensor, tree_starts: Tensor) -> AttentionMetadata:
        """With requests whose rows are nodes, in all groups."""
        groups = tuple(group.with_trees(tree_mask, tree_starts) for group in self.other_groups)
        return replace(self, tree_mask=tree_mask, tree_starts=tree_starts, other_groups=groups)

    def of_group(self, group: int) -> AttentionMetadata:
        return self.other_groups[group - 1] if group else self

    def with_groups(self, block_tables: Iterable[Tensor], slot_mappings: Iterable[Tensor]) -> AttentionMetadata:
        """With the tables and slots of the groups behind the first one."""
        tables = zip(block_tables, slot_mappings, strict=True)
        groups = tuple(replace(self, block_table=table, slot_mapping=slots) for table, slots in tables)
        return replace(self, other_groups=groups)

    @cached_property
    def chunk_start_loc(self) -> Tensor:
        """int32 [num_reqs - num_decodes + 1], leading 0: `query_start_loc` of the requests behind the single rows."""
        if self.num_decodes == 0:
            return self.query_start_loc  # the tensor itself, which a CUDA graph reads anew at each replay
        return self.query_start_loc[self.num_decodes :] - self.num_decodes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's part of the paged KV cache. Block 0 is the null block."""

    key_cache: (
        Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim, or half of that where two values share a byte]
    )
    value_cache: Tensor  # same
    spec: KVFormat = PLAIN
    key_scales: Tensor | None = None  # float16 [num_blocks + 1, block_size, num_kv_heads, num_scales]; None: plain
    value_scales: Tensor | None = None  # same
    group: int = 0  # the KV group whose blocks it has
    window: int | None = None  # tokens that the layer's queries attend to, the own one included; None: all

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        spec: KVFormat = PLAIN,
    ) -> LayerCache:
        """Room for `num_blocks` blocks and the null block.

        Zeros, not garbage: a masked position contributes 0 x value, and 0 x NaN is NaN.

        Args:
            dtype: the model's.
        """
        vectors = (num_blocks + 1, block_size, num_kv_heads)
        data_dtype = DTYPES.get(spec.name, dtype)
        width = head_dim // 2 if data_dtype == torch.uint8 else head_dim
        key_cache, value_cache = (torch.zeros(*vectors, width, dtype=data_dtype, device=device) for _ in range(2))
        if not spec.num_scales:
            return cls(key_cache, value_cache)
        key_scales, value_scales = (
            torch.zeros(*vectors, spec.num_scales, dtype=torch.float16, device=device) for _ in range(2)
        )
        return cls(key_cache, value_cache, spec, key_scales, value_scales)

    def tensors(self) -> list[Tensor]:
        """Everything that a block holds, its id the first index of each: what copying blocks copies.

        8-bit floats come as bytes, which every operation knows.
        """
        kept = (self.key_cache, self.value_cache, self.key_scales, self.value_scales)
        tensors = [tensor for tensor in kept if tensor is not None]
        return [tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for tensor in tensors]
