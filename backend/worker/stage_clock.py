"""`StageClock`: how long the stages of a step take."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

# To make an event takes a driver several times as long as to record it: those that have been read are taken again.
_events: list[torch.cuda.Event] = []


class StageClock:
    """When the stages of a step began, on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self.mark()

    def mark(self) -> None:
        """A stage ends here, and the next one begins."""
        if self._on_cuda:
            event = _events.pop() if _events else torch.cuda.Event(enable_timing=True)
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
        """How long each took; to be asked once. On CUDA the last mark must have been reached."""
        marks, self._marks = self._marks, []
        if not self._on_cuda:
            return [(end - begin) * 1e3 for begin, end in pairwise(marks)]  # type: ignore[operator]
        found = [begin.elapsed_time(end) for begin, end in pairwise(marks)]  # type: ignore[union-attr]
        _events.extend(marks)  # type: ignore[arg-type]
        return found
