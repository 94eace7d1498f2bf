"""`Spans`: what a proposer with keys and values of its own asks the batch for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from backend.worker.input_batch import StepInput


class Spans(Protocol):
    def span(self, token_ids: Mapping[str, Sequence[int]], ends: Sequence[int]) -> StepInput:
        """See `SpeculativeInputBatch.span`."""
        ...
