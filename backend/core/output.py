"""What crosses between scheduler, worker and engine: ints and lists, no tensors, no device. Picklable.

Records are not changed once handed over. Those made anew for every step or token are not `frozen`, only because building
a frozen one takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from backend.request import FinishReason
from backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

StepKind = Literal["prefill", "decode", "recompute"]

# Where a token comes from. accepted: it was drafted, and the target agreed. recovered: in place of the first draft that it did
# not agree to. bonus: behind a draft that was accepted to its end. plain: nothing had been drafted.
TokenOrigin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request the worker has not seen, or has forgotten since its preemption."""

    request_id: str
    token_ids: list[int]  # prompt, and after a preemption the output so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    banned_token_ids: tuple[int, ...]  # may not be sampled before `sampling_params.min_tokens`: EOS and stop ids
    block_ids: list[list[int]]  # one list per KV group
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. The order of `num_scheduled_tokens` is the order of the batch: single-token rows first.

    Ends are told before arrivals: an id of `finished_request_ids` may be in use again by one of `new_requests`.
    """

    step: int
    new_requests: list[NewRequestData]
    num_scheduled_tokens: dict[str, int]  # request_id -> tokens to run in this step
    num_computed_tokens: list[int]  # before this step, in batch order
    new_block_ids: dict[str, list[list[int]]]  # of requests the worker knows, where there are any; a list per KV group
    kinds: dict[str, StepKind]  # request_id -> what those tokens are, in batch order
    finished_request_ids: list[str]  # since the last step: the worker forgets them
    preempted_request_ids: list[str]  # in this step: likewise
    # (source, destination): copied before the step writes anything, every source as it stood before
    block_copies: Sequence[tuple[int, int]] = ()
    # Between the pool and host memory, before those: first out, then in. Sources were written by earlier steps.
    swapped_out: Sequence[tuple[int, int]] = ()  # (block, host block)
    swapped_in: Sequence[tuple[int, int]] = ()  # (host block, block)
    num_swapped: int = 0  # of the preempted requests, those that wait in host memory
    # Without speculation None. Of requests with a single token, in batch order: at most so many drafts may be verified behind
    # it; there are slots for them.
    num_draft_tokens: dict[str, int] | None = None
    # Of requests the worker knows: so many blocks of each KV group it has left; `new_block_ids` come behind those.
    num_kept_blocks: dict[str, int] | None = None
    # The step is another round of the requests and the draft lengths of the round before it, whose result is not known yet:
    # `num_computed_tokens` are the least there may be, and there are slots for the most.
    continues: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class DraftRounds:
    """The drafts that a step has verified, a row for each. numpy's arrays are for the record: nobody here looks into them.

    Of a tree, a row tells the path that was accepted and, where it was left before its end, the first node that was refused
    there: a chain whose tokens are those of the depths that were reached.

    A request that has no usable logits has a row too, which means nothing.
    """

    request_ids: list[str]
    num_draft_tokens: list[int]  # at least 1
    num_accepted: list[int]  # leading ones of them
    token_ids: list[int]  # behind those: recovered, or the bonus token
    draft_token_ids: np.ndarray  # int64 [num_rows, k]
    # float32 [3, num_rows, k], of the drafted tokens: by the target, that it is accepted, by the draft (1 where it was no draw)
    probs: np.ndarray
    draft_ms: float  # all are drafted, and verified, at once
    verify_ms: float
    num_nodes: list[int] | None = None  # that were drafted, where drafts are trees; None: they are chains
    # Gives the two times, which then are not above: to read a device's clock takes longer than the next round should wait for.
    clock: Callable[[], tuple[float, float]] | None = None

    def cut(self, row: int, most: int) -> None:
        """No more drafts of a row than so many, 1 at least: those behind them had no place in their request."""
        self.num_draft_tokens[row] = min(self.num_draft_tokens[row], most)
        if self.num_accepted[row] > most:
            self.num_accepted[row], self.token_ids[row] = most, int(self.draft_token_ids[row, most])

    def leave_out(self, request_ids: Set[str]) -> None:
        """As if nothing had been drafted for these."""
        if request_ids.isdisjoint(self.request_ids):
            return
        kept = [row for row, request_id in enumerate(self.request_ids) if request_id not in request_ids]
        self.request_ids = [self.request_ids[row] for row in kept]
        self.num_draft_tokens = [self.num_draft_tokens[row] for row in kept]
        self.num_accepted = [self.num_accepted[row] for row in kept]
        self.token_ids = [self.token_ids[row] for row in kept]
        self.draft_token_ids, self.probs = self.draft_token_ids[kept], self.probs[:, kept]

    def read_clock(self) -> None:
        if self.clock is not None:
            self.draft_ms, self.verify_ms = self.clock()
            self.clock = None

    @property
    def num_verified(self) -> list[int]:
        """Drafted tokens that ran, of each row."""
        return self.num_draft_tokens if self.num_nodes is None else self.num_nodes


@dataclass(slots=True)
class ModelRunnerOutput:
    """For each request that had its last known token computed in this step: what was sampled, or why nothing was."""

    sampled_token_ids: dict[str, list[int]]
    errors: dict[str, str] = field(default_factory=dict)  # request_id -> why it has no usable logits
    rounds: DraftRounds | None = None  # of the requests for which something was drafted; None: of none


class PendingOutput(Protocol):
    """A step that has been handed to the worker."""

    def result(self) -> ModelRunnerOutput:
        """Wait until the step's tokens are on the host. Asked once, in the order in which the steps were submitted."""
        ...


@dataclass(slots=True)
class FinishedOutput:
    """The `PendingOutput` of a step that was carried out at once."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


@dataclass(slots=True)
class RequestOutput:
    """What one step yielded for one request, still as ids."""

    request_id: str
    new_token_ids: list[int]  # without a final EOS or stop token
    finish_reason: FinishReason | None
    error: str | None = None
    # With speculation, of each new token; there may be one more, of a final EOS or stop token. Else None.
    origins: list[TokenOrigin] | None = None
    num_draft_tokens: int = 0  # that the step verified
