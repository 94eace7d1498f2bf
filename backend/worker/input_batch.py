"""`InputBatch`: the worker's copy of each request it runs, and the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.core.output import SchedulerOutput
from backend.sample.metadata import SamplingMetadata
from backend.sampling_params import SamplingParams


@dataclass(slots=True)
class _RequestState:
    row: int  # of the persistent block table
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    banned_token_ids: tuple[int, ...]
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the device."""

    token_ids: Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    sampled_request_ids: list[str]  # requests whose last known token is in this step
    logits_indices: Tensor  # int64 [num_sampled], their last rows
    sampling: SamplingMetadata


class InputBatch:
    """Args:
    max_num_reqs: most requests known at once.
    max_model_len: longest request, in tokens.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._states: dict[str, _RequestState] = {}
        self._free_rows = list(range(max_num_reqs))
        self._block_table = np.zeros((max_num_reqs, -(-max_model_len // block_size)), dtype=np.int32)

    def update(self, scheduled: SchedulerOutput) -> None:
        """Forget requests that ended or were preempted, take in new ones and new blocks."""
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            state = self._states.pop(request_id, None)
            if state is not None:
                self._free_rows.append(state.row)
        for new in scheduled.new_requests:
            state = _RequestState(
                row=self._free_rows.pop(),
                token_ids=new.token_ids,
                num_prompt_tokens=new.num_prompt_tokens,
                sampling_params=new.sampling_params,
                banned_token_ids=new.banned_token_ids,
            )
            self._states[new.request_id] = state
            self._add_blocks(state, new.block_ids)
        for cached in scheduled.cached_requests:
            self._add_blocks(self._states[cached.request_id], cached.new_block_ids)

    def build(self, scheduled: SchedulerOutput) -> StepInput:
        """The step's tensors, rows in the order of `scheduled.num_scheduled_tokens`."""
        computed_of = {item.request_id: item.num_computed_tokens for item in scheduled.new_requests}
        computed_of.update((item.request_id, item.num_computed_tokens) for item in scheduled.cached_requests)
        request_ids = list(scheduled.num_scheduled_tokens)
        states = [self._states[request_id] for request_id in request_ids]
        num_tokens = np.fromiter(scheduled.num_scheduled_tokens.values(), dtype=np.int64, count=len(states))
        num_computed = np.array([computed_of[request_id] for request_id in request_ids], dtype=np.int64)
        seq_lens = num_computed + num_tokens
        query_start_loc = np.concatenate(([0], np.cumsum(num_tokens)))

        token_ids = np.fromiter(
            (
                token_id
                for state, start, end in zip(states, num_computed.tolist(), seq_lens.tolist(), strict=True)
                for token_id in state.token_ids[start:end]
            ),
            dtype=np.int64,
            count=int(query_start_loc[-1]),
        )
        positions = np.arange(len(token_ids)) + np.repeat(num_computed - query_start_loc[:-1], num_tokens)
        rows = np.array([state.row for state in states])
        blocks = self._block_table[np.repeat(rows, num_tokens), positions // self._block_size]
        slot_mapping = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        max_num_blocks = -(-int(seq_lens.max()) // self._block_size)

        sampled = [index for index, state in enumerate(states) if seq_lens[index] == len(state.token_ids)]
        return StepInput(
            token_ids=self._to_device(token_ids),
            metadata=AttentionMetadata(
                query_start_loc=self._to_device(query_start_loc.astype(np.int32)),
                seq_lens=self._to_device(seq_lens.astype(np.int32)),
                block_table=self._to_device(self._block_table[rows, :max_num_blocks]),
                slot_mapping=self._to_device(slot_mapping),
                positions=self._to_device(positions),
            ),
            sampled_request_ids=[request_ids[index] for index in sampled],
            logits_indices=self._to_device(query_start_loc[1:][sampled] - 1),
            sampling=_sampling_metadata([states[index] for index in sampled]),
        )

    def append(self, request_id: str, token_id: int) -> None:
        """Remember a token sampled for a request: it is the input of its next step."""
        self._states[request_id].token_ids.append(token_id)

    def _add_blocks(self, state: _RequestState, block_ids: list[list[int]]) -> None:
        (new_blocks,) = block_ids  # one KV group
        self._block_table[state.row, state.num_blocks : state.num_blocks + len(new_blocks)] = new_blocks
        state.num_blocks += len(new_blocks)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _sampling_metadata(states: list[_RequestState]) -> SamplingMetadata:
    positions = [len(state.token_ids) - state.num_prompt_tokens for state in states]
    return SamplingMetadata(
        params=[state.sampling_params for state in states],
        positions=positions,
        banned_token_ids=[
            state.banned_token_ids if position < state.sampling_params.min_tokens else ()
            for state, position in zip(states, positions, strict=True)
        ],
    )
