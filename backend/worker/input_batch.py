"""`InputBatch`: the worker's copy of each request it runs, and the arrays that describe one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from backend.core.output import SchedulerOutput
from backend.sample.metadata import SamplingMetadata
from backend.sampling_params import SamplingParams
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE

# Stands for a token that was sampled and that the host need not know: the device takes it from the request's row.
SAMPLED_TOKEN = -1


@dataclass(slots=True)
class RequestState:
    row: int  # of the persistent arrays, and of the device's sampled tokens
    token_ids: list[int]  # those the scheduler told: the prompt, and after a preemption the output so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    banned_token_ids: tuple[int, ...]
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the host, requests in batch order: single-token rows, the longest first, then chunks.

    Programs of attention start in that order, and what starts last ought to be short. A batch that goes on keeps it.
    """

    token_ids: np.ndarray  # int64 [num_tokens]; SAMPLED_TOKEN: the last one sampled in the token's row
    token_rows: np.ndarray  # int64 [num_tokens], the row of each token's request
    positions: np.ndarray  # int64 [num_tokens]
    slot_mappings: np.ndarray  # int64 [num_groups, num_tokens], of each KV group
    query_start_loc: np.ndarray  # int32 [num_reqs + 1]
    seq_lens: np.ndarray  # int32 [num_reqs]
    # int32 [num_groups, num_reqs, blocks of the longest], of each KV group. Entries behind a window may name blocks that
    # others have by now: attention does not read them.
    block_tables: np.ndarray
    num_decodes: int  # leading requests with a single token
    sampled_request_ids: list[str]  # requests whose last known token is in this step
    sampled_reqs: np.ndarray  # int64 [num_sampled], their places in the batch
    sampled_rows: np.ndarray  # int64 [num_sampled], their rows
    logits_indices: np.ndarray  # int64 [num_sampled], their last tokens
    sampling: SamplingMetadata | None  # None: all greedy, and nothing is banned

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class RepeatInput:
    """A step like the one before it: the same requests in the same batch order, each one sampled token further."""

    request_ids: list[str]
    rows: np.ndarray  # int64 [num_reqs]
    new_blocks: list[tuple[int, int, int, int]]  # (KV group, place in the batch, column of the block table, block id)
    sampling: SamplingMetadata | None  # as in StepInput


@dataclass(slots=True)
class _Last:
    """The step built last, if one like it may follow."""

    scheduled_ids: list[str]  # in the scheduler's order
    request_ids: list[str]
    rows: np.ndarray
    max_seq_len: int
    is_plain: bool  # without `SamplingMetadata`, which those that follow do without then as well
    places: dict[int, int]  # of each row
    new_blocks: list[tuple[int, int, int, int]] = field(default_factory=list)  # that came since, see `RepeatInput`


class InputBatch:
    """Args:
    max_num_reqs: most requests known at once.
    max_model_len: longest request, in tokens.
    num_groups: KV groups of the model.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.max_model_len = max_model_len
        self._block_size = block_size
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_reqs))
        self._block_tables = np.zeros((num_groups, max_num_reqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._tables = list(self._block_tables)  # each group's, a view
        self._last: _Last | None = None
        self._num_known = np.zeros(max_num_reqs, dtype=np.int64)  # tokens whose ids the host has
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int64)  # those, and the ones sampled since
        self._num_free = np.zeros(max_num_reqs, dtype=np.int64)  # from so many tokens on, rows ban nothing
        self._num_plain = np.zeros(max_num_reqs, dtype=np.int64)  # the same, and are greedy

    def update(self, scheduled: SchedulerOutput) -> None:
        """Forget requests that ended or were preempted, take in new ones and new blocks."""
        if scheduled.new_requests or scheduled.finished_request_ids or scheduled.preempted_request_ids:
            self._last = None
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            state = self._states.pop(request_id, None)
            if state is not None:
                self._free_rows.append(state.row)
        for new in scheduled.new_requests:
            params = new.sampling_params
            state = RequestState(
                row=self._free_rows.pop(),
                token_ids=new.token_ids,
                num_prompt_tokens=new.num_prompt_tokens,
                sampling_params=params,
                banned_token_ids=new.banned_token_ids,
            )
            self._states[new.request_id] = state
            self._num_known[state.row] = self._num_tokens[state.row] = len(new.token_ids)
            num_free = new.num_prompt_tokens + (params.min_tokens if new.banned_token_ids else 0)
            is_greedy = params.temperature < GREEDY_TEMPERATURE
            self._num_free[state.row] = num_free
            self._num_plain[state.row] = num_free if is_greedy else np.iinfo(np.int64).max
            self._add_blocks(state, new.block_ids)
        for request_id, block_ids in scheduled.new_block_ids.items():
            self._add_blocks(self._states[request_id], block_ids)

    def repeats(self, scheduled: SchedulerOutput) -> int | None:
        """If this step is like the one before it, how many columns of the block table it needs; to be asked after `update`."""
        last, num_tokens = self._last, scheduled.num_scheduled_tokens
        if last is None or list(num_tokens) != last.scheduled_ids or max(num_tokens.values()) > 1:
            return None
        return max(-(-(last.max_seq_len + 1) // self._block_size), *(1 + it[2] for it in last.new_blocks), 0)

    def build_repeat(self, scheduled: SchedulerOutput, *, with_sampling: bool = True) -> RepeatInput:
        """In place of `build`, for a step that `repeats`.

        Args:
            with_sampling: else the caller knows how it is sampled.
        """
        last = self._last
        assert last is not None
        last.max_seq_len += 1
        new_blocks, last.new_blocks = last.new_blocks, []
        is_known = last.is_plain or not with_sampling
        sampling = None if is_known else self._sampling(last.rows, last.request_ids)
        self._num_tokens[last.rows] += 1
        return RepeatInput(last.request_ids, last.rows, new_blocks, sampling)

    def build(self, scheduled: SchedulerOutput) -> StepInput:
        """The step's arrays; what it samples counts as known from now on."""
        scheduled_ids = list(scheduled.num_scheduled_tokens)
        num_tokens = np.fromiter(scheduled.num_scheduled_tokens.values(), dtype=np.int64, count=len(scheduled_ids))
        num_computed = np.array(scheduled.num_computed_tokens, dtype=np.int64)
        num_decodes = int(np.count_nonzero(num_tokens == 1))
        order = np.arange(len(scheduled_ids))
        order[:num_decodes] = np.argsort(-num_computed[:num_decodes], kind="stable")
        num_tokens, num_computed = num_tokens[order], num_computed[order]
        request_ids = [scheduled_ids[index] for index in order.tolist()]
        num_reqs, states = len(request_ids), self._states
        rows = np.array([states[request_id].row for request_id in request_ids], dtype=np.int64)
        seq_lens = num_computed + num_tokens
        if num_decodes == num_reqs:
            query_start_loc = np.arange(num_reqs + 1, dtype=np.int32)
            token_rows, positions = rows, num_computed
        else:
            query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
            np.cumsum(num_tokens, out=query_start_loc[1:])
            token_rows = np.repeat(rows, num_tokens)
            positions = np.arange(len(token_rows)) + np.repeat(num_computed - query_start_loc[:-1], num_tokens)
        blocks = self._entries(token_rows, positions // self._block_size)
        slot_mappings = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        max_num_blocks = -(-int(seq_lens.max()) // self._block_size)
        if (
            num_decodes == num_reqs
        ):  # which may go on by itself, into blocks that speculation has left ahead of the tokens
            max_num_blocks = max(max_num_blocks, *(states[request_id].num_blocks for request_id in request_ids))

        sampled_reqs = np.flatnonzero(seq_lens == self._num_tokens[rows])
        sampled_rows = rows[sampled_reqs]
        sampled_request_ids = request_ids
        if len(sampled_reqs) < num_reqs:
            sampled_request_ids = [request_ids[index] for index in sampled_reqs.tolist()]
        sampling = self._sampling(sampled_rows, sampled_request_ids)
        self._num_tokens[sampled_rows] += 1
        token_ids = self._token_ids(request_ids, rows, num_computed, seq_lens, query_start_loc)
        self._last = None
        if num_decodes == len(sampled_reqs) == num_reqs and (token_ids == SAMPLED_TOKEN).all():
            places = {row: place for place, row in enumerate(rows.tolist())}
            self._last = _Last(scheduled_ids, request_ids, rows, int(seq_lens.max()), sampling is None, places)
        return StepInput(
            token_ids=token_ids,
            token_rows=token_rows,
            positions=positions,
            slot_mappings=slot_mappings,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self._entries(rows, slice(max_num_blocks)),
            num_decodes=num_decodes,
            sampled_request_ids=sampled_request_ids,
            sampled_reqs=sampled_reqs,
            sampled_rows=sampled_rows,
            logits_indices=query_start_loc[1:][sampled_reqs].astype(np.int64) - 1,
            sampling=sampling,
        )

    def _entries(self, rows: np.ndarray, columns: np.ndarray | slice) -> np.ndarray:
        """Of the block table of each group."""
        if len(self._tables) == 1:
            return self._tables[0][rows, columns][None]  # quicker by a third
        return self._block_tables[:, rows, columns]

    def _token_ids(
        self,
        request_ids: list[str],
        rows: np.ndarray,
        num_computed: np.ndarray,
        seq_lens: np.ndarray,
        query_start_loc: np.ndarray,
    ) -> np.ndarray:
        token_ids = np.full(query_start_loc[-1], SAMPLED_TOKEN, dtype=np.int64)
        for index in np.flatnonzero(num_computed < self._num_known[rows]).tolist():
            known = self._states[request_ids[index]].token_ids[num_computed[index] : seq_lens[index]]
            token_ids[query_start_loc[index] : query_start_loc[index] + len(known)] = known
        return token_ids

    def _add_blocks(self, state: RequestState, block_ids: list[list[int]]) -> None:
        begin, end = state.num_blocks, state.num_blocks + len(block_ids[0])
        if self._last is not None:
            place = self._last.places.get(state.row)
            if place is None:  # of a request that was not in that step
                self._last = None
            else:
                self._last.new_blocks += [
                    (group, place, column, block)
                    for group, blocks in enumerate(block_ids)
                    for column, block in enumerate(blocks, begin)
                ]
        for table, blocks in zip(self._tables, block_ids, strict=True):
            if len(blocks) == 1:  # quicker by far than a slice
                table[state.row, begin] = blocks[0]
            else:
                table[state.row, begin:end] = blocks
        state.num_blocks = end

    def _sampling(self, rows: np.ndarray, request_ids: list[str]) -> SamplingMetadata | None:
        if (self._num_tokens[rows] >= self._num_plain[rows]).all():
            return None
        states = [self._states[request_id] for request_id in request_ids]
        positions = [int(self._num_tokens[state.row]) - state.num_prompt_tokens for state in states]
        return SamplingMetadata(
            params=[state.sampling_params for state in states],
            positions=positions,
            banned_token_ids=[
                state.banned_token_ids if position < state.sampling_params.min_tokens else ()
                for state, position in zip(states, positions, strict=True)
            ],
        )
