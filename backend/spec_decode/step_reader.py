"""`StepReader`: what proposers that read the target's steps have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class StepReader:
    """Learns of tokens from the steps that run them, and knows of which requests none has run since they came."""

    needs_last_only = False  # see `HeadProposer`

    def __init__(self) -> None:
        self._unseen: set[str] = set()

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._unseen.add(request_id)

    def observed(self) -> None:
        """A step has been read, with all requests that there are."""
        self._unseen.clear()

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The steps tell."""

    def forget(self, request_id: str) -> None:
        self._unseen.discard(request_id)

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """The steps tell."""
