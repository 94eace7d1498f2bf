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
        columns, num_rows = SamplingColumns.of(metadata.params), len(metadata.params)
        # One buffer of 32-bit words, the widest first: a copy costs the same for one number as for a thousand.
        words = np.empty(5 * num_rows, dtype=np.int32)
        words[: 2 * num_rows].view(np.float64)[:] = uniform(columns.seeds.tolist(), metadata.positions, Purpose.TOKEN)
        words[2 * num_rows :] = columns.words().ravel()
        draws, *rows = copy_to(words, device).split((2 * num_rows, num_rows, num_rows, num_rows))
        temperature, top_p, top_k = rows[0].view(torch.float32), rows[1].view(torch.float32), rows[2]
        return SamplingTensors(temperature, top_k, top_p, draws.view(torch.float64))


def copy_to(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device. On CUDA by way of pinned memory, so that nothing waits for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
