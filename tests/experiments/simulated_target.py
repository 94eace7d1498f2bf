"""A target in virtual time, so that tests of seconds take none and every moment is known."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from backend.request import sample_ids
from backend.sampling_params import SamplingParams
from backend.workload.targets import Prompt, StreamEvent


@dataclass
class Plan:
    """What happens to a request once it is served: (seconds after the last one, tokens, text) of each delivery."""

    deliveries: list[tuple[float, int, str]]
    finish_reason: str = "length"
    error: str | None = None


def tokens(count: int, first: float = 0.1, gap: float = 0.01) -> Plan:
    return Plan([(first if index == 0 else gap, 1, "x") for index in range(count)])


class SimulatedTarget:
    """Serves up to `capacity` requests at once, first come, first served, as `plan` says; each sample is one.

    `clock` and `wait` go to the driver: waiting moves the clock on to the next delivery, or by the seconds asked for.
    """

    def __init__(self, plan: Callable[[str, Prompt, SamplingParams], Plan], capacity: int = 1000) -> None:
        self.plan = plan
        self.capacity = capacity
        self.now = 50.0
        self.in_flight: set[str] = set()
        self.most_in_flight = 0
        self.submitted: list[tuple[str, float, float | None]] = []  # request id, when sent, arrival
        self.priorities: dict[str, int] = {}
        self.aborted: list[str] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.deaf = False  # ignores aborts
        self._queue: deque[tuple[str, Plan]] = deque()
        self._serving: set[str] = set()
        self._listeners: dict[str, Callable[[StreamEvent], None]] = {}
        self._events: list[tuple[float, int, StreamEvent]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.on_wait()
        end = self.now + seconds
        if not self._events or self._events[0][0] > end:
            self.now = end
            return
        self.now = max(self.now, self._events[0][0])
        while self._events and self._events[0][0] <= self.now:
            _, _, event = heapq.heappop(self._events)
            if event.request_id in self.in_flight:
                self._deliver(event)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Callable[[StreamEvent], None],
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        plans = {key: self.plan(key, prompt, sampling) for key in sample_ids(request_id, sampling.n)}
        self.submitted.append((request_id, self.now, arrival_time))
        self.priorities[request_id] = priority
        self.in_flight |= plans.keys()
        self._listeners |= dict.fromkeys(plans, on_event)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self._queue.extend(plans.items())
        self._serve()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self.deaf:
            return
        if request_id in self.in_flight:
            self._deliver(StreamEvent(request_id, self.now, (), "", "abort"))

    def _serve(self) -> None:
        while self._queue and len(self._serving) < self.capacity:
            request_id, plan = self._queue.popleft()
            self._serving.add(request_id)
            time = self.now
            for index, (delay, count, text) in enumerate(plan.deliveries):
                time += delay
                last = index == len(plan.deliveries) - 1
                event = StreamEvent(
                    request_id,
                    time,
                    tuple(range(count)),
                    text,
                    finish_reason=plan.finish_reason if last else None,  # type: ignore[arg-type]
                    error=plan.error if last else None,
                    num_prompt_tokens=7 if last else None,
                    num_cached_tokens=0 if last else None,
                    num_preemptions=0 if last else None,
                    scheduled_time=self.now if last else None,
                )
                heapq.heappush(self._events, (time, next(self._order), event))

    def _deliver(self, event: StreamEvent) -> None:
        if event.finish_reason is not None:
            self.in_flight.discard(event.request_id)
            self._serving.discard(event.request_id)
        self._listeners[event.request_id](event)
        self._serve()
