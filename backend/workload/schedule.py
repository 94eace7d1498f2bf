"""`Schedule`: which request of a workload is sent next, and when it arrives."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from backend.metrics.stats import RequestStats
from backend.workload.datasets import WorkloadRequest
from backend.workload.targets import Prompt


class Schedule:
    """Requests in the order in which they arrive.

    A first turn, or a request that is no conversation's, arrives at its planned time; in a closed loop, when a place is
    free. A further turn arrives once the answer before it has ended and its pause has passed, with all that was said
    before it in its prompt. A conversation keeps its place in a closed loop until its last turn has ended.

    Args:
        requests: by time of arrival, a conversation's turns in their order.
        start: when the first may arrive, on the driver's clock.
        concurrency: places of a closed loop; None for an open one.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], start: float, concurrency: int | None = None) -> None:
        self._start = start
        self._waiting: deque[WorkloadRequest] = deque()
        self._further: dict[int, deque[WorkloadRequest]] = {}  # by conversation, the turns after the one last sent
        for request in requests:
            if request.turn is None:
                self._waiting.append(request)
            elif request.turn.conversation in self._further:
                self._further[request.turn.conversation].append(request)
            else:
                self._further[request.turn.conversation] = deque()
                self._waiting.append(request)
        self._thinking: list[tuple[float, int, WorkloadRequest]] = []  # a heap of further turns by arrival, then index
        # When each free place of a closed loop became free.
        self._places = None if concurrency is None else deque([start] * concurrency)
        self.num_left = len(requests)  # neither sent nor given up

    def due(self) -> float | None:
        """When the next request arrives; None while only the end of another one can tell."""
        first = self._first_turn_due()
        if self._thinking and (first is None or self._thinking[0][0] <= first):
            return self._thinking[0][0]
        return first

    def take(self) -> tuple[WorkloadRequest, float]:
        """The request that `due` speaks of and its arrival time."""
        self.num_left -= 1
        first = self._first_turn_due()
        if self._thinking and (first is None or self._thinking[0][0] <= first):
            due, _, request = heapq.heappop(self._thinking)
            return request, due
        assert first is not None, "nothing is due"
        if self._places is not None:
            self._places.popleft()
        return self._waiting.popleft(), first

    def end(self, request: WorkloadRequest, stats: RequestStats) -> int:
        """Take in how a request, or the last sample of a prompt, ended. Returns how many further turns are given up for it."""
        further = None if request.turn is None else self._further[request.turn.conversation]
        given_up = 0
        if further and stats.status == "finished":
            following = further.popleft()
            assert following.turn is not None
            said = (request.prompt.token_ids or ()) + (stats.token_ids or ()) + (following.prompt.token_ids or ())
            arrival_time = stats.finish_time + following.turn.think_s
            following = replace(following, prompt=Prompt(token_ids=said))
            heapq.heappush(self._thinking, (arrival_time, following.index, following))
            return 0
        if further:
            given_up = len(further)
            self.num_left -= given_up
            further.clear()
        if self._places is not None:
            self._places.append(stats.finish_time)
        return given_up

    def _first_turn_due(self) -> float | None:
        if not self._waiting or (self._places is not None and not self._places):
            return None
        return self._places[0] if self._places is not None else self._start + (self._waiting[0].arrival_s or 0.0)
