"""How many slots of a run's steps held a request: what static batching leaves idle, and whether anybody could have used it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backend.metrics.request_timeline import RequestTimeline
from backend.metrics.step_composition import StepComposition

_WAITS = ("queued", "preempted", "swapped")  # without a slot


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Slot-steps: one slot for one step, however long that took, as `backend.analysis.batching` counts them."""

    num_slots: int
    num_steps: int
    used_slot_steps: int
    idle_while_waiting_slot_steps: int  # as many as requests waited, for whatever reason they were not let in

    @property
    def slot_steps(self) -> int:
        return self.num_slots * self.num_steps

    @property
    def idle_share(self) -> float | None:
        """Of all slot-steps, 0…1; None without a step."""
        return 1 - self.used_slot_steps / self.slot_steps if self.slot_steps else None

    @property
    def idle_while_waiting_share(self) -> float | None:
        """Likewise."""
        return self.idle_while_waiting_slot_steps / self.slot_steps if self.slot_steps else None


def slot_use(
    composition: StepComposition, timelines: Iterable[RequestTimeline], num_slots: int, steps: range
) -> SlotUse:
    """Args:
    timelines: of all requests; those that waited in these steps are counted.
    num_slots: `max_num_seqs`.
    steps: there must be all of them.
    """
    begin, end = steps.start - composition.first_step, steps.stop - composition.first_step
    used = composition.num_requests[begin:end]
    changes = np.zeros(len(composition.steps) + 1, dtype=np.int64)
    for timeline in timelines:
        for span in timeline.spans:
            if span.kind in _WAITS:
                changes[span.first_step - composition.first_step] += 1
                changes[span.end_step - composition.first_step] -= 1
    waiting = np.cumsum(changes)[begin:end]
    idle_while_waiting = np.minimum(np.maximum(num_slots - used, 0), waiting)
    return SlotUse(num_slots, len(steps), int(used.sum()), int(idle_while_waiting.sum()))
