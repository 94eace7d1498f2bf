"""What graphs leave of a step for a draft head to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from backend.attention.metadata import AttentionMetadata

# Puts what is to be read of a pass, whose hidden states it gets, where no other graph writes, and returns that.
Keep = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GraphPass:
    """Of one pass of the target; what a graph leaves is overwritten by its next replay."""

    states: Tensor  # float [num_tokens, hidden], see `TargetStep`
    rows: Tensor  # int64 [num_tokens], of the batch's persistent arrays
    metadata: AttentionMetadata
