"""`Spans`: what a proposer with keys and values of its own asks the batch for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from backend.worker.input_batch import StepInput


class Spans(Protocol):
    def span(self, token_ids: Mapping[str, Sequence[int]], ends: Sequence[int]) -> StepInput:
        """See `SpeculativeInputBatch.span`."""
        ...

    def block_tables(self, request_ids: Sequence[str], num_tokens: int) -> np.ndarray:
        """See `SpeculativeInputBatch.block_tables`."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    def blocks_of(self, request_id: str) -> Sequence[int]:
        """The ids of a request's blocks in the first KV group."""
        ...
