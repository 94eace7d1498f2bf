"""`Flight`: a request between its submission and its last event."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

from backend.metrics.live import UnderWay
from backend.metrics.stats import RequestStats, tpot_ms_between
from backend.workload.datasets import WorkloadRequest
from backend.workload.targets import StreamEvent

_STATUS: dict[str, Literal["finished", "failed", "cancelled"]] = {
    "stop": "finished",
    "length": "finished",
    "abort": "cancelled",
    "error": "failed",
}


@dataclass(slots=True, eq=False)
class Flight:
    """Collects a request's events on the target's thread; the last one hands the flight over to the driver's."""

    request_id: str
    request: WorkloadRequest
    warmup: bool
    arrival_time: float
    ended: SimpleQueue[Flight]
    events: list[StreamEvent] = field(default_factory=list)
    num_tokens: int = 0
    first_time: float | None = None  # of the deliveries so far
    last_time: float | None = None

    def on_event(self, event: StreamEvent) -> None:
        self.events.append(event)
        if event.token_ids:
            if self.first_time is None:
                self.first_time = event.time
            self.last_time = event.time
            self.num_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self.ended.put(self)

    def end(self, time: float, finish_reason: Literal["abort", "error"], error: str | None) -> RequestStats:
        """The record of a request whose target said no last word."""
        self.events.append(StreamEvent(self.request_id, time, (), "", finish_reason, error))
        return self.stats()

    def stats(self) -> RequestStats:
        """The record of a request that has ended. Tokens are counted by id; an event without any is no delivery."""
        events, last = self.events, self.events[-1]
        deliveries = [event for event in events if event.token_ids]
        token_ids = tuple(token_id for event in deliveries for token_id in event.token_ids)
        reason = last.finish_reason or "error"
        return RequestStats(
            request_id=self.request_id,
            index=self.request.index,
            warmup=self.warmup,
            status=_STATUS[reason],
            finish_reason=reason,
            error=last.error,
            arrival_time=self.arrival_time,
            scheduled_time=last.scheduled_time,
            emission_times=tuple(event.time for event in deliveries),
            emission_tokens=tuple(len(event.token_ids) for event in deliveries),
            finish_time=last.time,
            num_prompt_tokens=last.num_prompt_tokens,
            num_output_tokens=len(token_ids),
            num_cached_tokens=last.num_cached_tokens,
            num_preemptions=last.num_preemptions,
            prompt=self.request.prompt.text,
            text="".join(event.text for event in events),
            token_ids=token_ids,
        )


def under_way(flights: Collection[Flight]) -> UnderWay:
    """What can be told of requests before they end."""
    ttft, tpot = [], []
    for flight in flights:
        # Read once each, the last first: the target's thread may add a delivery meanwhile.
        num_tokens, last, first = flight.num_tokens, flight.last_time, flight.first_time
        if flight.warmup or first is None or last is None:
            continue
        ttft.append((first - flight.arrival_time) * 1e3)
        so_far = tpot_ms_between(first, last, num_tokens) if last > first else None
        if so_far is not None:
            tpot.append(so_far)
    return UnderWay(len(flights), ttft, tpot)
