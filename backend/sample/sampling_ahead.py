"""`SamplingAhead`: draws of the steps to come, where the same rows go on token by token."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.sample.metadata import SamplingMetadata, SamplingTensors

# A draw is a function of seed and position: those of so many steps are made and copied in about the time of one's.
NUM_STEPS = 16


class SamplingAhead:
    """The `SamplingTensors` of one step after the other. Rows that were a position before in the step before are expected to go
    on: those of several steps are then on the device before they are wanted."""

    def __init__(self) -> None:
        self._last: SamplingMetadata | None = None  # of the step whose tensors were handed out last
        self._steps: list[SamplingTensors] = []  # that follow it, the next one last

    def tensors(self, metadata: SamplingMetadata, device: torch.device) -> SamplingTensors | None:
        """As `SamplingTensors.build`. Waits for nothing."""
        last = self._last
        if last is not None and _goes_on(last, metadata):
            return self.next(device)
        self._last, self._steps = metadata, []
        return SamplingTensors.build(metadata, device)

    def next(self, device: torch.device) -> SamplingTensors | None:
        """Of the step behind the last one: the same rows, each one position further."""
        last = self._last
        assert last is not None
        following = replace(last, positions=[position + 1 for position in last.positions])
        self._last = following
        if not following.samples:
            return None
        if not self._steps:
            self._steps = SamplingTensors.build_steps(following, NUM_STEPS, device)[::-1]
        return self._steps.pop()


def _goes_on(last: SamplingMetadata, metadata: SamplingMetadata) -> bool:
    """Whether these are the last step's rows, each one position further."""
    return len(metadata.params) == len(last.params) and all(
        one is other and position == before + 1  # the same objects for the same requests
        for one, other, position, before in zip(
            metadata.params, last.params, metadata.positions, last.positions, strict=True
        )
    )
