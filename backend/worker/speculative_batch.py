"""`SpeculativeInputBatch`: an `InputBatch` whose requests may go several tokens further in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backend.core.output import SchedulerOutput
from backend.sample.metadata import SamplingMetadata
from backend.spec_decode.proposer import DraftRequest
from backend.worker.input_batch import SAMPLED_TOKEN, InputBatch, StepInput


@dataclass(frozen=True, slots=True)
class Verification:
    """Which tokens of a step are drafts, a row for each request that has some; rows in the order of the draft."""

    request_ids: list[str]
    rows: np.ndarray  # int64 [num_rows], their rows in the batch
    num_draft_tokens: np.ndarray  # int64 [num_rows], at least 1
    draft_indices: np.ndarray  # int64 [num_drafts], places of the drafts among the step's tokens, row by row
    logits_indices: np.ndarray  # int64 [num_drafts + num_rows], of each row's last token and its drafts
    sampling: SamplingMetadata | None  # of each row's first position; None: all greedy, and nothing is banned


class SpeculativeInputBatch(InputBatch):
    """Steps follow each other with the result of the one before known: the scheduler's counts say how far requests are."""

    def update(self, scheduled: SchedulerOutput) -> None:
        for request_id, num_blocks in (scheduled.num_kept_blocks or {}).items():
            self._states[request_id].num_blocks = num_blocks
        super().update(scheduled)

    def repeats(self, scheduled: SchedulerOutput) -> int | None:
        """Not where tables change otherwise than by growing with their requests."""
        return None if scheduled.num_kept_blocks or scheduled.num_draft_tokens else super().repeats(scheduled)

    def build(self, scheduled: SchedulerOutput) -> StepInput:
        rows = np.array([self._states[request_id].row for request_id in scheduled.num_scheduled_tokens], dtype=np.int64)
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
        rows = np.array([self._states[request_id].row for request_id in token_ids], dtype=np.int64)
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
        rows = np.array([self._states[request_id].row for request_id in request_ids], dtype=np.int64)
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
