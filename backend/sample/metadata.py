"""`SamplingMetadata`: how each row of logits is to be sampled, and the same as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.sample.columns import SamplingColumns
from backend.sample.random import Purpose, uniform
from backend.sampling_params import SamplingParams
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """One entry per row of logits. `banned_token_ids` is () for a row past its `min_tokens`."""

    params: list[SamplingParams]
    positions: list[int]  # index of the output token being drawn
    banned_token_ids: list[tuple[int, ...]]

    @property
    def samples(self) -> bool:
        """Whether any row is not greedy."""
        return any(row.temperature >= GREEDY_TEMPERATURE for row in self.params)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """What `sample_tokens` takes beside the logits, each [num_rows], on the logits' device."""

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    draws: Tensor  # float64

    @staticmethod
    def build(metadata: SamplingMetadata, device: torch.device) -> SamplingTensors | None:
        """Draw on the host and copy everything at once, without waiting for it; None if all rows are greedy."""
        if not metadata.samples:
            return None
        return SamplingTensors.build_steps(metadata, 1, device)[0]

    @staticmethod
    def build_steps(metadata: SamplingMetadata, num_steps: int, device: torch.device) -> list[SamplingTensors]:
        """The same of that step and those behind it, in each of which every row is one position further."""
        columns, num_rows = SamplingColumns.of(metadata.params), len(metadata.params)
        # One buffer of 32-bit words, the widest first: a copy costs the same for one number as for a thousand.
        words = np.empty((2 * num_steps + 3) * num_rows, dtype=np.int32)
        positions = np.array(metadata.positions, dtype=np.int64) + np.arange(num_steps)[:, None]
        seeds = np.tile(columns.seeds, num_steps)
        draws = uniform(seeds.tolist(), positions.ravel().tolist(), Purpose.TOKEN)
        words[: 2 * num_steps * num_rows].view(np.float64)[:] = draws
        words[2 * num_steps * num_rows :] = columns.words().ravel()
        drawn, *rows = copy_to(words, device).split((2 * num_steps * num_rows, num_rows, num_rows, num_rows))
        temperature, top_p, top_k = rows[0].view(torch.float32), rows[1].view(torch.float32), rows[2]
        by_step = drawn.view(torch.float64).view(num_steps, num_rows)
        return [SamplingTensors(temperature, top_k, top_p, draws=each) for each in by_step]


def copy_to(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device. On CUDA by way of pinned memory, so that nothing waits for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
