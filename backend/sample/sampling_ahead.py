"""`SamplingAhead`: how the same rows are sampled in one step after the other, with draws that reach the device steps early."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from backend.sample.metadata import SamplingMetadata, SamplingTensors

# A draw is a function of seed and position: those of so many steps are made and copied at once, in about the time of one's.
NUM_STEPS = 16


class SamplingAhead:
    """
    Attributes:
        rows: int64 [num_rows], of the batch's persistent arrays, on the device.

    Args:
        metadata: of a step; in each that follows every row is one position further. It bans nothing, and samples some row.
    """

    def __init__(self, metadata: SamplingMetadata, rows: Tensor) -> None:
        self.rows = rows
        self._metadata = metadata
        self._num_done = 1
        self._steps: list[SamplingTensors] = []  # that follow, the next one last

    @staticmethod
    def behind(metadata: SamplingMetadata | None, rows: Tensor) -> SamplingAhead | None:
        """Of the steps behind one that is sampled so; None where they want something else than draws, or nothing."""
        if metadata is None or not metadata.samples or any(metadata.banned_token_ids):
            return None
        return SamplingAhead(metadata, rows)

    def next(self) -> SamplingTensors:
        """Of the next step. Waits for nothing."""
        if not self._steps:
            positions = [position + self._num_done for position in self._metadata.positions]
            metadata = replace(self._metadata, positions=positions)
            self._steps = SamplingTensors.build_steps(metadata, NUM_STEPS, self.rows.device)[::-1]
            self._num_done += NUM_STEPS
        return self._steps.pop()
