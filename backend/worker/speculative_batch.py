"""`SpeculativeInputBatch`: an `InputBatch` whose requests may go several tokens further in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backend.core.output import SchedulerOutput
from backend.sample.columns import SamplingColumns
from backend.sample.metadata import SamplingMetadata
from backend.spec_decode.proposer import DraftRequest
from backend.worker.input_batch import SAMPLED_TOKEN, InputBatch, RequestState, StepInput


@dataclass(frozen=True, slots=True)
class Verification:
    """Which tokens of a step are drafts, a row for each request that has some; rows in the order of the draft."""

    request_ids: list[str]
    rows: np.ndarray  # int64 [num_rows], their rows in the batch
    num_draft_tokens: np.ndarray  # int64 [num_rows], at least 1
    draft_indices: np.ndarray  # int64 [num_drafts], places of the drafts among the step's tokens, row by row
    logits_indices: np.ndarray  # int64 [num_drafts + num_rows], of each row's last token and its drafts
    sampling: SamplingMetadata | None  # of each row's first position; None: all greedy, and nothing is banned


@dataclass(frozen=True, slots=True)
class RoundSampling:
    """How the rows of a round are sampled; greedy ones have a temperature of 0."""

    columns: SamplingColumns
    num_prompt_tokens: np.ndarray  # int64 [num_reqs]

    @staticmethod
    def of(states: Sequence[RequestState]) -> RoundSampling | None:
        """None where all are greedy."""
        columns = SamplingColumns.of(state.sampling_params for state in states)
        if columns.is_greedy.all():
            return None
        columns.temperature[columns.is_greedy] = 0
        return RoundSampling(
            columns=columns,
            num_prompt_tokens=np.array([state.num_prompt_tokens for state in states], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class RoundInput:
    """A step in which all requests decode, with drafts behind the last tokens of some; rows in the step's order."""

    request_ids: list[str]
    rows: np.ndarray  # int64 [num_reqs], their rows in the batch
    num_draft_tokens: np.ndarray  # int64 [num_reqs]
    granted: list[int]  # the places of those that might be drafted for
    num_computed: np.ndarray  # int64 [num_reqs], tokens before each one's last
    tables: RoundTables
    sampling: RoundSampling | None = None  # None: all are greedy


@dataclass(frozen=True, slots=True)
class RoundTables:
    """The block tables of a round; the same object for rounds of the same requests as long as they do not change."""

    # int32 [num_groups, num_reqs, max_num_blocks]: wide enough for as many drafts behind a round that is accepted whole. Where a
    # request has no block there is the null block.
    entries: np.ndarray
    num_slots: np.ndarray  # int64 [num_reqs], that each request's blocks have


class SpeculativeInputBatch(InputBatch):
    """Steps follow each other with the result of the one before known: the scheduler's counts say how far requests are."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        super().__init__(max_num_reqs, max_model_len, block_size, num_groups)
        self._last_rows: tuple[list[str], np.ndarray] = ([], np.empty(0, dtype=np.int64))
        self._free_ids: list[str] | None = None  # of a step of which `is_free_round` held
        self._free_sampling: RoundSampling | None = None  # of those
        self._round_ids: list[str] = []
        self._round_tables: RoundTables | None = None  # of those, unless blocks have come or gone since

    def update(self, scheduled: SchedulerOutput) -> None:
        if scheduled.new_requests or scheduled.finished_request_ids or scheduled.preempted_request_ids:
            self._last_rows = ([], np.empty(0, dtype=np.int64))
            self._free_ids = None
        for request_id, num_blocks in (scheduled.num_kept_blocks or {}).items():
            self._states[request_id].num_blocks = num_blocks
            self._round_tables = None
        super().update(scheduled)

    def _add_blocks(self, state: RequestState, block_ids: list[list[int]]) -> None:
        super()._add_blocks(state, block_ids)
        self._round_tables = None

    def build(self, scheduled: SchedulerOutput) -> StepInput:
        rows = self._rows(scheduled.num_scheduled_tokens)
        num_tokens = np.array(scheduled.num_computed_tokens, dtype=np.int64) + 1
        self._num_tokens[rows] = np.maximum(self._num_tokens[rows], num_tokens)
        return super().build(scheduled)

    def requests(self, scheduled: SchedulerOutput) -> list[DraftRequest]:
        """Those that may be drafted for in this step."""
        granted, requests = scheduled.num_draft_tokens or {}, []
        for request_id, num_computed in zip(scheduled.num_scheduled_tokens, scheduled.num_computed_tokens, strict=True):
            if request_id in granted:
                state = self._states[request_id]
                num_tokens = num_computed + 1
                place = (num_tokens - state.num_prompt_tokens, state.row, num_tokens)
                requests.append(DraftRequest(request_id, granted[request_id], state.sampling_params, *place))
        return requests

    def is_free_round(self, scheduled: SchedulerOutput) -> bool:
        """Whether all requests go on from a token that the device has, and no id is banned of any."""
        request_ids = list(scheduled.num_scheduled_tokens)
        if request_ids == self._free_ids:
            return True  # for the same requests, and further on, it holds again
        num_computed = np.array(scheduled.num_computed_tokens, dtype=np.int64)
        rows = self._rows(request_ids)
        has_last = num_computed >= self._num_known[rows]
        holds = bool((has_last & (num_computed + 1 >= self._num_free[rows])).all())
        self._free_ids = request_ids if holds else None
        if holds:
            self._free_sampling = RoundSampling.of([self._states[request_id] for request_id in request_ids])
        return holds

    def build_round(self, scheduled: SchedulerOutput, num_draft_tokens: Mapping[str, int], longest: int) -> RoundInput:
        """In place of `build`, for a step of which `is_free_round` holds.

        Args:
            num_draft_tokens: of those that might be drafted for.
            longest: most drafts of any round.
        """
        request_ids = list(scheduled.num_scheduled_tokens)
        rows = self._rows(request_ids)
        num_computed = np.array(scheduled.num_computed_tokens, dtype=np.int64)
        self._num_tokens[rows] = num_computed + 2
        self._last = None
        if self._round_tables is None or request_ids != self._round_ids:
            self._round_ids, self._round_tables = request_ids, self._make_round_tables(rows, request_ids, longest)
        counts = np.array([num_draft_tokens.get(request_id, 0) for request_id in request_ids], dtype=np.int64)
        granted = [place for place, request_id in enumerate(request_ids) if request_id in num_draft_tokens]
        return RoundInput(request_ids, rows, counts, granted, num_computed, self._round_tables, self._free_sampling)

    def repeat_round(self, last: RoundInput, longest: int) -> RoundInput:
        """The same requests and drafts again, where their blocks are now; nobody knows yet where they stand."""
        if self._round_tables is None:
            self._round_tables = self._make_round_tables(last.rows, last.request_ids, longest)
        return replace(last, tables=self._round_tables)

    def _make_round_tables(self, rows: np.ndarray, request_ids: list[str], longest: int) -> RoundTables:
        num_blocks = np.array([self._states[request_id].num_blocks for request_id in request_ids], dtype=np.int64)
        # As far as a round and two drafts reach behind a request's end, if that lies in a round whose result is not known.
        num_columns = int(num_blocks.max()) + -(-(3 * longest + 1) // self._block_size)
        entries = self._entries(rows, slice(num_columns))
        return RoundTables(entries * (np.arange(entries.shape[2]) < num_blocks[:, None]), num_blocks * self._block_size)

    def _rows(self, request_ids: Iterable[str]) -> np.ndarray:
        """int64 [num_reqs], in the persistent arrays. Most steps have the requests of the step before."""
        request_ids, states = list(request_ids), self._states
        if request_ids != self._last_rows[0]:
            rows = np.array([states[request_id].row for request_id in request_ids], dtype=np.int64)
            self._last_rows = request_ids, rows
        return self._last_rows[1]

    def next_token_ids(self, step: StepInput) -> np.ndarray:
        """What comes behind each of a step's tokens, int64 [num_tokens]; SAMPLED_TOKEN where that is what it samples."""
        ends = step.query_start_loc[1:] - 1
        rows = step.token_rows[ends]
        following = np.roll(step.token_ids, -1)
        following[ends] = SAMPLED_TOKEN
        unfinished = np.flatnonzero(step.seq_lens < self._num_known[rows])
        if len(unfinished):
            by_row = {state.row: state for state in self._states.values()}
            for place in unfinished.tolist():
                following[ends[place]] = by_row[int(rows[place])].token_ids[step.seq_lens[place]]
        return following

    def span(self, token_ids: Mapping[str, Sequence[int]], ends: Sequence[int]) -> StepInput:
        """A step of nothing but these tokens, in the slots of their requests; nothing counts as known by it.

        Args:
            token_ids: request -> tokens, at least one.
            ends: of each, the place in its request behind the last.
        """
        rows = self._rows(token_ids)
        counts = np.array([len(tokens) for tokens in token_ids.values()], dtype=np.int64)
        seq_lens = np.array(ends, dtype=np.int64)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(len(token_rows)) + np.repeat(seq_lens - counts - query_start_loc[:-1], counts)
        blocks = self._entries(token_rows, positions // self._block_size)
        nothing = np.empty(0, dtype=np.int64)
        return StepInput(
            token_ids=np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in token_ids.values()]),
            token_rows=token_rows,
            positions=positions,
            slot_mappings=blocks.astype(np.int64) * self._block_size + positions % self._block_size,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self._entries(rows, slice(-(-int(seq_lens.max()) // self._block_size))),
            num_decodes=len(rows) if (counts == 1).all() else 0,
            sampled_request_ids=[],
            sampled_reqs=nothing,
            sampled_rows=nothing,
            logits_indices=query_start_loc[1:].astype(np.int64) - 1,
            sampling=None,
        )

    @property
    def block_size(self) -> int:
        return self._block_size

    def blocks_of(self, request_id: str) -> list[int]:
        """The ids of a request's blocks in the first KV group."""
        state = self._states[request_id]
        return self._tables[0][state.row, : state.num_blocks].tolist()

    def block_tables(self, request_ids: Sequence[str], num_tokens: int) -> np.ndarray:
        """Of the first KV group, int32 [num_reqs, blocks of so many tokens]; where a request has no block, the null block."""
        tables = self._tables[0][self._rows(request_ids), : -(-num_tokens // self._block_size)]
        num_blocks = np.array([self._states[request_id].num_blocks for request_id in request_ids], dtype=np.int64)
        num_missing = -(-num_tokens // self._block_size) - tables.shape[1]  # behind the longest request there may be
        tables = np.pad(tables, ((0, 0), (0, num_missing)))
        return tables * (np.arange(tables.shape[1], dtype=np.int32) < num_blocks[:, None])

    def build_drafted(
        self, scheduled: SchedulerOutput, num_draft_tokens: Mapping[str, int]
    ) -> tuple[StepInput, Verification]:
        """In place of `build`, with drafts behind the single tokens of these requests.

        Their places in `StepInput.token_ids` are to be filled. What the step samples in its other rows counts as known.

        Args:
            num_draft_tokens: at least 1 each.
        """
        num_computed = dict(zip(scheduled.num_scheduled_tokens, scheduled.num_computed_tokens, strict=True))
        num_tokens = dict(scheduled.num_scheduled_tokens)
        for request_id, count in num_draft_tokens.items():
            num_tokens[request_id] += count
        ordered = dict(sorted(num_tokens.items(), key=lambda item: item[1] > 1))
        places = {request_id: place for place, request_id in enumerate(ordered)}
        step = self.build(
            replace(
                scheduled,
                num_scheduled_tokens=ordered,
                num_computed_tokens=[num_computed[request_id] for request_id in ordered],
            )
        )
        request_ids = list(num_draft_tokens)
        rows = self._rows(request_ids)
        counts = np.array(list(num_draft_tokens.values()), dtype=np.int64)
        begins = step.query_start_loc[[places[request_id] for request_id in request_ids]].astype(np.int64)
        # Of each row, its last token and the drafts behind it.
        offsets = np.arange(int(counts.sum()) + len(counts)) - np.repeat(np.cumsum(counts + 1) - counts - 1, counts + 1)
        logits_indices = np.repeat(begins, counts + 1) + offsets
        return step, Verification(
            request_ids=request_ids,
            rows=rows,
            num_draft_tokens=counts,
            draft_indices=logits_indices[offsets > 0],
            logits_indices=logits_indices,
            sampling=self._sampling(rows, request_ids),
        )
