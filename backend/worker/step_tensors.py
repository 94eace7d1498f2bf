"""A step's arrays on the device: one copy takes them there, out of memory that the card can read by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.worker.input_batch import StepInput

# While a step's arrays are written, copies of two others may wait for the device: of the one before it, which may not have begun,
# and of what the one before that does behind its tokens, which are all that the host has waited for.
STEPS_UNDER_WAY = 3
COPIES_PER_STEP = 4  # at most: tokens or the numbers of a round, block tables, a proposer's texts, what a head is told


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step on the device."""

    token_ids: Tensor  # int64 [num_tokens]
    token_rows: Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    logits_indices: Tensor  # int64 [num_sampled]
    sampled_rows: Tensor  # int64 [num_sampled]


class HostBuffers:
    """Page-locked memory in turn, so that copies from it need not be waited for. On a CPU: plain memory.

    Args:
        copies_per_step: how often a step may ask for some.
    """

    def __init__(self, device: torch.device, copies_per_step: int = COPIES_PER_STEP) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [self._allocate(2**20) for _ in range(STEPS_UNDER_WAY * copies_per_step)]
        self._turn = 0

    def next(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], to be written now and left alone until `STEPS_UNDER_WAY` steps have asked for theirs."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer.numel() < num_bytes:
            buffer = self._buffers[self._turn] = self._allocate(2 * num_bytes)
        return buffer[:num_bytes]

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)


def write_parts(buffer: Tensor, arrays: list[np.ndarray]) -> None:
    """Lay arrays end to end in `buffer`, in order; 8-byte ones first keep all aligned."""
    view, begin = buffer.numpy(), 0
    for array in arrays:
        view[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        begin += array.nbytes


def step_arrays(step: StepInput) -> list[np.ndarray]:
    """What `device_views` makes tensors of; the block tables go apart."""
    return [
        step.token_ids,
        step.token_rows,
        step.positions,
        step.slot_mappings,
        step.logits_indices,
        step.sampled_rows,
        step.query_start_loc,
        step.seq_lens,
    ]


def device_views(
    remote: Tensor, step: StepInput, block_tables: Tensor, longest_chunk: int | None = None
) -> StepTensors:
    """Tensors over the bytes that `write_parts` laid out for `step_arrays(step)`.

    Args:
        block_tables: int32 [num_groups, num_reqs, max_num_blocks].
        longest_chunk: see `AttentionMetadata`.
    """
    tensors, begin = [], 0
    for array in step_arrays(step):
        dtype = torch.int64 if array.dtype == np.int64 else torch.int32
        tensors.append(remote[begin : begin + array.nbytes].view(dtype))
        begin += array.nbytes
    token_ids, token_rows, positions, slot_mappings, logits_indices, sampled_rows, start_loc, seq_lens = tensors
    slot_mappings = slot_mappings.view(step.slot_mappings.shape)
    metadata = AttentionMetadata(
        query_start_loc=start_loc,
        seq_lens=seq_lens,
        block_table=block_tables[0],
        slot_mapping=slot_mappings[0],
        positions=positions,
        num_decodes=step.num_decodes,
        longest_chunk=longest_chunk,
    )
    return StepTensors(
        token_ids=token_ids,
        token_rows=token_rows,
        metadata=metadata.with_groups(block_tables[1:], slot_mappings[1:]) if len(block_tables) > 1 else metadata,
        logits_indices=logits_indices,
        sampled_rows=sampled_rows,
    )


def to_device(step: StepInput, buffers: HostBuffers, device: torch.device) -> StepTensors:
    """Copy a step's arrays to the device without waiting."""
    arrays = step_arrays(step)
    fixed = sum(array.nbytes for array in arrays)
    host = buffers.next(fixed + step.block_tables.nbytes)
    write_parts(host, [*arrays, np.ascontiguousarray(step.block_tables)])
    # On a CPU the tensors must outlive the buffer's next turn.
    remote = host.to(device, non_blocking=True) if device.type == "cuda" else host.clone()
    longest_chunk = int(np.diff(step.query_start_loc[step.num_decodes :]).max(initial=1))
    return device_views(remote, step, remote[fixed:].view(torch.int32).view(step.block_tables.shape), longest_chunk)
