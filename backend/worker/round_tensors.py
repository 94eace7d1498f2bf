"""The arrays of a speculative round, as they lie in memory for a graph of some size: `RoundLayout`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.spec_decode.proposer import DraftChain
from backend.worker.speculative_batch import RoundInput

ALIGNMENT = 16  # bytes: of the arrays, so that kernels need not be compiled for each way that they lie


@dataclass(frozen=True, slots=True)
class RoundArrays:
    """Views into the memory of a round, whose matrix has the row's last token and k drafts in each row.

    Only the places that a row drafts are tokens of the step, packed row by row; what is behind them is padding.
    """

    rows: Tensor  # int64 [size], of the batch's persistent arrays
    counts: Tensor  # int64 [size], drafts of each row
    starts: Tensor  # int64 [size], each row's first token
    sources: Tensor  # int64 [size * (k + 1)], the place in the matrix of each token
    places: Tensor  # int64 [size, k + 1], the token of each place in the matrix; a row's last one where it has none
    positions: Tensor  # int64 [size * (k + 1)]
    slot_mappings: Tensor  # int64 [num_groups, size * (k + 1)]
    # Of each place in the matrix, column by column, and so of each pass that drafts.
    pass_positions: Tensor  # int64 [k + 1, size]
    pass_slot_mappings: Tensor  # int64 [num_groups, k + 1, size]
    pass_seq_lens: Tensor  # int32 [k + 1, size]; 0 where there is no token
    query_start_loc: Tensor  # int32 [size + 1]
    seq_lens: Tensor  # int32 [size]


class RoundLayout:
    """Args:
    size: rows of the graph.
    k: drafts of each row at most.
    """

    def __init__(self, size: int, k: int, num_groups: int) -> None:
        self.size, self.k, self._num_groups = size, k, num_groups
        num_tokens = size * (k + 1)
        self._fields: dict[str, tuple[int, np.dtype, tuple[int, ...]]] = {}
        begin = 0
        for name, dtype, shape in (
            ("rows", np.int64, (size,)),
            ("counts", np.int64, (size,)),
            ("starts", np.int64, (size,)),
            ("sources", np.int64, (num_tokens,)),
            ("places", np.int64, (size, k + 1)),
            ("positions", np.int64, (num_tokens,)),
            ("slot_mappings", np.int64, (num_groups, num_tokens)),
            ("pass_positions", np.int64, (k + 1, size)),
            ("pass_slot_mappings", np.int64, (num_groups, k + 1, size)),
            ("pass_seq_lens", np.int32, (k + 1, size)),
            ("query_start_loc", np.int32, (size + 1,)),
            ("seq_lens", np.int32, (size,)),
        ):
            self._fields[name] = begin, np.dtype(dtype), shape
            begin += -(-prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = begin
        self._views: dict[int, SimpleNamespace] = {}

    def views(self, memory: Tensor) -> RoundArrays:
        """The arrays in uint8 [num_bytes] and more."""
        views = {}
        for name, (begin, dtype, shape) in self._fields.items():
            part = memory[begin : begin + prod(shape) * dtype.itemsize]
            views[name] = part.view(torch.int64 if dtype == np.int64 else torch.int32).view(shape)
        return RoundArrays(**views)

    def write(self, host: Tensor, step: RoundInput, padding_row: int) -> None:
        """Lay a round out in host memory, uint8 [num_bytes] and more."""
        at = self._host_views(host)
        size, k = self.size, self.k
        num_reqs, num_tokens = len(step.rows), len(step.positions)
        counts, begins = step.num_draft_tokens, step.query_start_loc[:-1]
        at.rows[:num_reqs] = step.rows
        at.counts[:num_reqs] = counts
        at.starts[:num_reqs] = begins
        at.positions[:num_tokens] = step.positions
        at.slot_mappings[:, :num_tokens] = step.slot_mappings
        at.query_start_loc[: num_reqs + 1] = step.query_start_loc
        at.seq_lens[:num_reqs] = step.positions[begins + counts] + 1
        if num_tokens == num_reqs * (k + 1):
            places = at.places[:num_reqs] = np.arange(num_tokens).reshape(num_reqs, k + 1)
            at.sources[:num_tokens] = places.reshape(-1)
            at.pass_positions[:, :num_reqs] = step.positions.reshape(num_reqs, k + 1).T
            slot_mappings = step.slot_mappings.reshape(self._num_groups, num_reqs, k + 1)
            at.pass_slot_mappings[:, :, :num_reqs] = slot_mappings.swapaxes(1, 2)
            at.pass_seq_lens[:, :num_reqs] = at.pass_positions[:, :num_reqs] + 1
        else:
            columns = np.arange(k + 1)
            is_token = columns <= counts[:, None]
            places = at.places[:num_reqs] = begins[:, None] + np.minimum(columns, counts[:, None])
            at.sources[:num_tokens] = np.flatnonzero(is_token)
            at.pass_positions[:, :num_reqs] = (step.positions[places] * is_token).T
            at.pass_slot_mappings[:, :, :num_reqs] = (step.slot_mappings[:, places] * is_token).swapaxes(1, 2)
            at.pass_seq_lens[:, :num_reqs] = at.pass_positions[:, :num_reqs] + is_token.T
            at.sources[num_tokens:] = at.positions[num_tokens:] = 0
            at.slot_mappings[:, num_tokens:] = 0
        if num_reqs < size:
            at.rows[num_reqs:] = padding_row
            at.counts[num_reqs:] = at.starts[num_reqs:] = at.seq_lens[num_reqs:] = 0
            at.places[num_reqs:] = 0
            at.sources[num_tokens:] = at.positions[num_tokens:] = 0
            at.slot_mappings[:, num_tokens:] = 0
            at.pass_positions[:, num_reqs:] = at.pass_seq_lens[:, num_reqs:] = 0
            at.pass_slot_mappings[:, :, num_reqs:] = 0
            at.query_start_loc[num_reqs + 1 :] = num_tokens

    def _host_views(self, host: Tensor) -> SimpleNamespace:
        """The fields of `RoundArrays` as numpy's arrays; made once for each of the few buffers there are."""
        found = self._views.get(host.data_ptr())
        if found is None:
            memory, views = host.numpy(), {}
            for name, (begin, dtype, shape) in self._fields.items():
                views[name] = memory[begin : begin + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            found = self._views[host.data_ptr()] = SimpleNamespace(**views)
        return found

    def metadata(self, arrays: RoundArrays, block_tables: Tensor) -> AttentionMetadata:
        """Of the verification, over tables int32 [num_groups, size, max_num_blocks]."""
        metadata = AttentionMetadata(
            query_start_loc=arrays.query_start_loc,
            seq_lens=arrays.seq_lens,
            block_table=block_tables[0],
            slot_mapping=arrays.slot_mappings[0],
            positions=arrays.positions,
            num_decodes=0,
        )
        return metadata.with_groups(block_tables[1:], arrays.slot_mappings[1:])

    def chain(self, arrays: RoundArrays, block_tables: Tensor, last_token_ids: Tensor, one_each: Tensor) -> DraftChain:
        """Args:
        last_token_ids: int64 [size].
        one_each: int32 [size + 1], counting up.
        """
        passes = []
        for index in range(self.k + 1):
            slot_mappings = arrays.pass_slot_mappings[:, index]
            metadata = AttentionMetadata(
                query_start_loc=one_each,
                seq_lens=arrays.pass_seq_lens[index],
                block_table=block_tables[0],
                slot_mapping=slot_mappings[0],
                positions=arrays.pass_positions[index],
                num_decodes=self.size,
            )
            passes.append(metadata.with_groups(block_tables[1:], slot_mappings[1:]))
        return DraftChain(last_token_ids, arrays.rows, passes)
