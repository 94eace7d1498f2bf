"""`StepPlan`: a step while the scheduler puts it together, and the message to the worker that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.core.output import NewRequestData, SchedulerOutput, StepKind
from backend.request import Request


@dataclass(slots=True)
class StepPlan:
    """A step while it is being put together."""

    max_num_batched_tokens: int
    num_prompts: int  # running requests that need more than one token
    budget: int = field(init=False)  # tokens that the step can still take
    num_tokens: dict[Request, int] = field(default_factory=dict)  # to run in this step; its order is the batch's
    new_block_ids: dict[Request, list[list[int]]] = field(default_factory=dict)  # one list per KV group
    admitted: list[Request] = field(default_factory=list)  # the worker is told all about them
    preempted: list[str] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # destination block -> source
    swapped_out: Sequence[tuple[int, int]] = ()  # as in `SchedulerOutput`, as the two below
    swapped_in: Sequence[tuple[int, int]] = ()
    num_swapped: int = 0

    def __post_init__(self) -> None:
        self.budget = self.max_num_batched_tokens

    def add(self, request: Request, num_tokens: int, block_ids: list[list[int]]) -> None:
        known = self.new_block_ids.get(request)
        if known is not None:
            for blocks, more in zip(known, block_ids, strict=True):
                blocks.extend(more)
        elif any(block_ids):
            self.new_block_ids[request] = block_ids
        self.num_tokens[request] = self.num_tokens.get(request, 0) + num_tokens
        self.budget -= num_tokens

    def add_single_tokens(self, requests: Sequence[Request]) -> None:
        """One token each of requests that are not in the plan, whose blocks come later where they need any."""
        self.num_tokens |= dict.fromkeys(requests, 1)
        self.budget -= len(requests)

    def add_copies(self, copies: list[tuple[int, int]]) -> None:
        """All are carried out at once: what was copied from a copy is copied from where that came from."""
        for source, destination in copies:
            self.copies[destination] = self.copies.get(source, source)

    def remove(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request, 0)
        self.new_block_ids.pop(request, None)

    def put_single_tokens_first(self) -> None:
        """Order the batch: attention handles single-token rows as one."""
        if len(self.num_tokens) > 1 and max(self.num_tokens.values()) > 1:
            self.num_tokens = dict(sorted(self.num_tokens.items(), key=lambda item: item[1] > 1))

    def to_output(self, step: int, finished_request_ids: list[str]) -> SchedulerOutput:
        """The message; requests are still as before the step."""
        rows = self.num_tokens
        request_ids = [request.request_id for request in rows]
        num_computed_tokens = [request.num_computed_tokens for request in rows]
        kinds: dict[str, StepKind] = dict.fromkeys(request_ids, "decode")
        for request, computed in zip(rows, num_computed_tokens, strict=True):
            # What its next tokens are: a chunk that spans two kinds counts as the first.
            if computed < request.num_recompute_tokens:
                kinds[request.request_id] = "recompute"
            elif computed < request.num_prompt_tokens:
                kinds[request.request_id] = "prefill"
        new_requests = [_describe(request, self.new_block_ids.pop(request)) for request in self.admitted]
        return SchedulerOutput(
            step=step,
            new_requests=new_requests,
            num_scheduled_tokens=dict(zip(request_ids, rows.values(), strict=True)),
            num_computed_tokens=num_computed_tokens,
            new_block_ids={request.request_id: block_ids for request, block_ids in self.new_block_ids.items()},
            kinds=kinds,
            finished_request_ids=finished_request_ids,
            preempted_request_ids=self.preempted,
            block_copies=[(source, destination) for destination, source in self.copies.items()] if self.copies else (),
            swapped_out=self.swapped_out,
            swapped_in=self.swapped_in,
            num_swapped=self.num_swapped,
        )


def num_needed(request: Request) -> int:
    """Tokens until the next one can be sampled."""
    return len(request.token_ids) + request.num_placeholder_tokens - request.num_computed_tokens


def _describe(request: Request, block_ids: list[list[int]]) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        banned_token_ids=tuple(sorted(request.ending_token_ids)),
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
    )
