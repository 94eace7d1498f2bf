"""`SamplingMetadata`: how each row of logits is to be sampled."""

from __future__ import annotations

from dataclasses import dataclass

from backend.sampling_params import SamplingParams

# Below this a temperature is greedy: the scaled logits could not be told from a one-hot, and would only overflow.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """One entry per row of logits. `banned_token_ids` is () for a row past its `min_tokens`."""

    params: list[SamplingParams]
    positions: list[int]  # index of the output token being drawn
    banned_token_ids: list[tuple[int, ...]]

    @property
    def sampled_rows(self) -> list[int]:
        """Rows that are not greedy."""
        return [row for row, params in enumerate(self.params) if params.temperature >= GREEDY_TEMPERATURE]
