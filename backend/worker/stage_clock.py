"""`StageClock`: how long the stages of a step take."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StageClock:
    """When the stages of a step began, on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self.mark()

    def mark(self) -> None:
        """A stage ends here, and the next one begins."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait(self) -> None:
        """Hold up the host until the last mark is reached."""
        last = self._marks[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()

    def stages_ms(self) -> list[float]:
        """How long each took. On CUDA the last mark must have been reached."""
        times = self._marks
        if self._on_cuda:
            return [begin.elapsed_time(end) for begin, end in pairwise(times)]  # type: ignore[union-attr]
        return [(end - begin) * 1e3 for begin, end in pairwise(times)]  # type: ignore[operator]
