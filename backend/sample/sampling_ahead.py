"""`SamplingAhead`: draws of the steps to come, where the same rows go on token by token."""

from __future__ import annotations

import torch

from backend.sample.metadata import SamplingMetadata, SamplingTensors
from backend.sampling_params import SamplingParams

# A draw is a function of seed and position: those of so many steps are made and copied in about the time of one's.
NUM_STEPS = 16


class SamplingAhead:
    """The `SamplingTensors` of one step after the other. Rows that were a position before in the step before are expected to go
    on: those of several steps are then on the device before they are wanted."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []  # of the last step's rows, the same objects for the same requests
        self._positions: list[int] = []  # of the first step that is known
        self._steps: list[SamplingTensors] = []
        self._num_done = 0  # of those

    def tensors(self, metadata: SamplingMetadata, device: torch.device) -> SamplingTensors | None:
        """As `SamplingTensors.build`. Waits for nothing."""
        if not metadata.samples:
            return None
        if self._goes_on(metadata):
            if self._num_done == len(self._steps):
                self._begin(metadata, NUM_STEPS, device)
        else:
            self._begin(metadata, 1, device)
        self._num_done += 1
        return self._steps[self._num_done - 1]

    def _goes_on(self, metadata: SamplingMetadata) -> bool:
        """Whether these are the last step's rows, each one position further."""
        if len(metadata.params) != len(self._params):
            return False
        expected = (position + self._num_done for position in self._positions)
        return all(
            one is other and position == wanted
            for one, other, position, wanted in zip(
                metadata.params, self._params, metadata.positions, expected, strict=True
            )
        )

    def _begin(self, metadata: SamplingMetadata, num_steps: int, device: torch.device) -> None:
        self._params, self._positions, self._num_done = list(metadata.params), list(metadata.positions), 0
        self._steps = SamplingTensors.build_steps(metadata, num_steps, device)
