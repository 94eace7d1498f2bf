"""`Proposer`: who drafts tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.sampling_params import SamplingParams


@dataclass(slots=True)
class DraftRequest:
    """A request that is to be drafted for. Not `frozen` only because that takes several times as long to build."""

    request_id: str
    max_tokens: int  # of the draft, at least 1; there are slots for them behind the request's last token
    sampling_params: SamplingParams
    position: int  # index in its output of the first drafted token
    row: int  # of the batch's persistent arrays
    num_tokens: int  # that the request has, the last of which the target has not run yet


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """A draft for each request, in the order in which they were asked for.

    Tensors lie on the target's device, or the token ids in the host's memory, if it is the host that drafts.
    """

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


class Text(Protocol):
    """The tokens of a request, a list or an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Sequence[int] | np.ndarray: ...


class TextProposer(Proposer, Protocol):
    """A proposer whose greedy drafts lie in the requests' texts, where a device that has them can look them up as well."""

    def text(self, request_id: str) -> Text:
        """All tokens of a request; the same object, which grows, from `begin` to `forget`."""
        ...


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What a step of the target leaves for a head to read. All tensors lie on its device."""

    # float [num_tokens, hidden]: what the head reads of each token, the hidden states as the target's `StepDecoder` gives them,
    # or features fused as the head does it.
    states: Tensor
    next_token_ids: Tensor  # int64 [num_tokens], what came behind each; behind a rejected draft any
    metadata: AttentionMetadata
    rows: Tensor  # int64 [num_reqs], of the batch's persistent arrays
    last_indices: Tensor  # int64 [num_reqs], of each request's last token in the step that was not rejected


@dataclass(frozen=True, slots=True)
class DraftChain:
    """The requests of a step in which all decode, as the device sees them. Padding rows write to the null block only."""

    last_token_ids: Tensor  # int64 [num_rows], the token that the target has not run yet
    rows: Tensor  # int64 [num_rows], of the batch's persistent arrays
    # Of single tokens: the last one, then each drafted one. A row that drafts fewer is padding in those behind.
    passes: Sequence[AttentionMetadata]

    @property
    def num_tokens(self) -> int:
        """Of the longest draft."""
        return len(self.passes) - 1


class ChainProposer(Proposer, Protocol):
    """A proposer whose greedy drafts come from the device alone: they can be recorded in a CUDA graph."""

    def prepare(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """The host's part of a draft that `draft` makes: how many tokens it has for each; None: `propose` is to be asked."""
        ...

    def draft(self, chain: DraftChain) -> Tensor:
        """Greedy tokens for each row, int64 [num_rows, chain.num_tokens]. Reads nothing of the host's."""
        ...


class HeadProposer(ChainProposer, Protocol):
    """A proposer that reads the target's hidden states.

    `needs_last_only`: what it reads of a step is all that counts, not what it read before of the same requests.
    """

    @property
    def needs_last_only(self) -> bool: ...

    def observe(self, step: TargetStep) -> None:
        """A step of the target has run. Asked for every one, before the next draft."""
        ...

    def read(self, step: TargetStep) -> None:
        """The device's part of `observe`, which a CUDA graph can record."""
        ...

    def observed(self) -> None:
        """The host's part of `observe`."""
        ...
