"""`Proposer`: who drafts tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that is to be drafted for."""

    request_id: str
    max_tokens: int  # of the draft, at least 1; there are slots for them behind the request's last token
    sampling_params: SamplingParams
    position: int  # index in its output of the first drafted token
    row: int  # of the batch's persistent arrays
    num_tokens: int  # that the request has, the last of which the target has not run yet


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """A draft for each request, in the order in which they were asked for. Tensors lie on the target's device."""

    token_ids: Tensor  # int64 [num_reqs, k]; what lies behind a request's `num_tokens` means nothing
    num_tokens: list[int]  # of each, 0 up to its `max_tokens`
    probs: Tensor | None = (
        None  # float32 [num_reqs, k, vocab], what each token was drawn from; None: a point mass on it
    )


class Proposer(Protocol):
    """Told of every request the worker knows, and of all tokens of each, whoever they come from."""

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """A request comes, or comes back after its preemption, with the tokens it has.

        Args:
            num_computed_tokens: of those, whose KV its blocks hold already.
        """
        ...

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request has got further tokens."""
        ...

    def forget(self, request_id: str) -> None:
        """A request has ended or was preempted."""
        ...

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """The target is about to compute a prompt's tokens of these requests, each from one place to another."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        """What may come behind the last token of each.

        How many tokens are drafted must not depend on a token that is left out, see `RejectionSampler`.
        """
        ...


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What a step of the target leaves for a head to read. All tensors lie on its device."""

    hidden: Tensor  # float [num_tokens, hidden], as the target's `StepDecoder` gives it
    features: Tensor | None  # float [num_tokens, hidden], fused as the head does it; None for one that takes none
    next_token_ids: Tensor  # int64 [num_tokens], what came behind each; behind a rejected draft any
    metadata: AttentionMetadata
    rows: Tensor  # int64 [num_reqs], of the batch's persistent arrays
    last_indices: Tensor  # int64 [num_reqs], of each request's last token in the step that was not rejected


class HeadProposer(Proposer, Protocol):
    """A proposer that reads the target's hidden states."""

    def observe(self, step: TargetStep) -> None:
        """A step of the target has run. Asked for every one, before the next `propose`."""
        ...
