"""`SamplingColumns`: the sampling parameters of rows as arrays, in the widths that kernels take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backend.sampling_params import SamplingParams
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE

MAX_TOP_K = 2**31 - 1  # one too large for an int32 is above any vocabulary, and so off


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Each [num_rows]."""

    temperature: np.ndarray  # float32
    top_p: np.ndarray  # float32
    top_k: np.ndarray  # int32
    seeds: np.ndarray  # uint64

    @staticmethod
    def of(params: Iterable[SamplingParams]) -> SamplingColumns:
        rows = list(params)
        return SamplingColumns(
            temperature=np.array([row.temperature for row in rows], dtype=np.float32),
            top_p=np.array([row.top_p for row in rows], dtype=np.float32),
            top_k=np.array([min(row.top_k, MAX_TOP_K) for row in rows], dtype=np.int32),
            seeds=np.array([row.seed for row in rows], dtype=np.uint64),
        )

    @property
    def is_greedy(self) -> np.ndarray:
        """bool [num_rows]"""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether any row has top-k or top-p."""
        return bool((self.top_k > 0).any() or (self.top_p < 1).any())

    def words(self) -> np.ndarray:
        """Temperature, top-p and top-k, int32 [3, num_rows]: the bits of what is not an integer."""
        return np.stack((self.temperature.view(np.int32), self.top_p.view(np.int32), self.top_k))
