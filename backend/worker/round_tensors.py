"""What the graphs of a speculative round read of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.spec_decode.proposer import DraftChain
from backend.worker.speculative_batch import RoundInput, RoundTables
from backend.worker.step_tensors import HostBuffers
from kernels.reference.round_positions import RoundPositions
from kernels.reference.sample_nodes import SampledNodes

NO_REQUEST = -1  # in place of a row's computed tokens

# An implementation of `sample_nodes`.
SampleNodes = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], SampledNodes]


@dataclass(frozen=True, slots=True)
class RoundRows:
    """All that the host says of a round beside its block tables: views of `num_round_numbers(size, k)` int64."""

    rows: Tensor  # int64 [size], of the batch's persistent arrays
    counts: Tensor  # int64 [size], drafts of each row
    num_computed: Tensor  # int64 [size], tokens before each row's last one; `NO_REQUEST`: padding
    num_granted: (
        Tensor  # int64 [size], drafts that each row may have in the next round, where those are looked up; else 0
    )
    seeds: Tensor  # int64 [size], of sampled rows, the bits of unsigned ones
    num_prompt_tokens: Tensor  # int64 [size], of sampled rows
    temperature: Tensor  # float32 [size]; of a greedy row 0
    top_p: Tensor  # float32 [size]
    top_k: Tensor  # int32 [size]
    drafts: Tensor  # int64 [size, k], where they are not made by a proposer that runs on the device

    @classmethod
    def of(cls, numbers: Tensor, size: int, k: int) -> RoundRows:
        wide = numbers[: 6 * size].view(6, size)
        narrow = numbers[6 * size : 8 * size].view(torch.int32).view(4, size)
        return cls(
            *wide,
            temperature=narrow[0].view(torch.float32),
            top_p=narrow[1].view(torch.float32),
            top_k=narrow[2],
            drafts=numbers[8 * size :].view(size, k),
        )

    def sample(self, op: SampleNodes, logits: Tensor, drafts: Tensor, parents: Tensor, depths: Tensor) -> SampledNodes:
        """What sampled rows draw behind each node of their drafts, see the op `sample_nodes`."""
        return op(
            logits,
            drafts,
            parents,
            depths,
            self.temperature,
            self.top_k,
            self.top_p,
            self.seeds,
            self.num_prompt_tokens,
            self.num_computed,
        )


def num_round_numbers(size: int, k: int) -> int:
    return (8 + k) * size


class RoundUploads:
    """The memory in which graphs of rounds, which never run at the same time, find what the host says of one.

    Args:
        largest: rows of the largest graph.
        k: most drafts of a row that the host makes.
        padding_row: of the batch's persistent arrays, for rows without a request.
    """

    def __init__(self, largest: int, k: int, padding_row: int, device: torch.device) -> None:
        self._numbers = torch.zeros(num_round_numbers(largest, k), dtype=torch.int64, device=device)
        self._padding_row = padding_row
        self._device = device
        self._tables: RoundTables | None = None  # that were uploaded last

    def padding(self, size: int, k: int) -> RoundRows:
        """Where a graph of so many rows and drafts reads them; for its capture, there is no request in any."""
        rows = RoundRows.of(self._numbers[: num_round_numbers(size, k)], size, k)
        rows.rows.fill_(self._padding_row)
        rows.counts.zero_()
        rows.num_computed.fill_(NO_REQUEST)
        rows.num_granted.zero_()
        rows.temperature.zero_()
        return rows

    def upload(
        self,
        step: RoundInput,
        size: int,
        k: int,
        buffers: HostBuffers,
        drafts: np.ndarray | None = None,
        num_granted: np.ndarray | None = None,
    ) -> None:
        """Args:
        k: drafts of each row that are uploaded, 0 without any.
        drafts, num_granted: see `write_round`.
        """
        num_numbers = num_round_numbers(size, k)
        host = buffers.next(8 * num_numbers)
        write_round(host.numpy().view(np.int64), step, size, self._padding_row, drafts, num_granted)
        self._numbers[:num_numbers].copy_(host.view(torch.int64), non_blocking=True)

    def upload_tables(self, tables: RoundTables, block_tables: Tensor, buffers: HostBuffers) -> None:
        """Into int32 [num_groups, size, max_num_blocks], unless these are there already."""
        if tables is self._tables:
            return
        self._tables, entries = tables, tables.entries
        host = buffers.next(entries.nbytes)
        host.numpy()[:] = entries.reshape(-1).view(np.uint8)
        remote = host.to(self._device, non_blocking=True).view(torch.int32).view(entries.shape)
        block_tables[:, : entries.shape[1], : entries.shape[2]].copy_(remote)


def write_round(
    numbers: np.ndarray,
    step: RoundInput,
    size: int,
    padding_row: int,
    drafts: np.ndarray | None = None,
    num_granted: np.ndarray | None = None,
) -> None:
    """Lay a round out in memory, int64 [num_round_numbers(size, k)].

    Args:
        drafts: int64 [num_drafted, up to k], of the rows that have any; None: the device has them, and none are written.
        num_granted: int64 [num_drafted], of the same rows; None: nothing is looked up for the next round.
    """
    num_reqs = len(step.rows)
    numbers[:num_reqs] = step.rows
    numbers[size : size + num_reqs] = step.num_draft_tokens
    numbers[2 * size : 2 * size + num_reqs] = step.num_computed
    if num_reqs < size:
        numbers[num_reqs:size] = padding_row
        numbers[size + num_reqs : 2 * size] = 0
        numbers[2 * size + num_reqs : 3 * size] = NO_REQUEST
    numbers[3 * size : 4 * size] = 0
    if num_granted is not None:
        numbers[3 * size : 4 * size][step.granted] = num_granted
    numbers[4 * size : 8 * size] = 0  # greedy
    if step.sampling is not None:
        columns = step.sampling.columns
        numbers[4 * size : 4 * size + num_reqs] = columns.seeds.view(np.int64)
        numbers[5 * size : 5 * size + num_reqs] = step.sampling.num_prompt_tokens
        numbers[6 * size : 8 * size].view(np.int32).reshape(4, size)[:3, :num_reqs] = columns.words()
    if drafts is not None:
        matrix = numbers[8 * size :].reshape(size, -1)
        matrix[:] = 0
        matrix[step.granted, : drafts.shape[1]] = drafts


def round_metadata(placed: RoundPositions, block_tables: Tensor) -> AttentionMetadata:
    """Of the verification, over tables int32 [num_groups, num_rows, max_num_blocks]."""
    metadata = AttentionMetadata(
        query_start_loc=placed.query_start_loc,
        seq_lens=placed.seq_lens,
        block_table=block_tables[0],
        slot_mapping=placed.slot_mappings[0],
        positions=placed.positions,
        num_decodes=0,
        longest_chunk=placed.places.shape[1],
    )
    return metadata.with_groups(block_tables[1:], placed.slot_mappings[1:])


def round_chain(
    placed: RoundPositions, rows: Tensor, block_tables: Tensor, last_token_ids: Tensor, one_each: Tensor
) -> DraftChain:
    """Of the passes that draft it.

    Args:
        rows: int64 [num_rows], of the batch's persistent arrays.
        last_token_ids: int64 [num_rows].
        one_each: int32 [num_rows + 1], counting up.
    """
    passes = []
    for index, seq_lens in enumerate(placed.pass_seq_lens):
        slot_mappings = placed.pass_slot_mappings[:, index]
        metadata = AttentionMetadata(
            query_start_loc=one_each,
            seq_lens=seq_lens,
            block_table=block_tables[0],
            slot_mapping=slot_mappings[0],
            positions=placed.pass_positions[index],
            num_decodes=len(rows),
        )
        passes.append(metadata.with_groups(block_tables[1:], slot_mappings[1:]))
    return DraftChain(last_token_ids, rows, passes)
