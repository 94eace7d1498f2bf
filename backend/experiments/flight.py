"""`Flight`: a request between its submission and its last event."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from io import StringIO
from queue import SimpleQueue
from typing import Literal

from backend.metrics.live import UnderWay
from backend.metrics.stats import RequestStats, tpot_ms_between
from backend.request import sample_ids
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
    """Collects the events of a request, or of one sample, on the target's thread; the last one hands it to the driver's."""

    request_id: str
    request: WorkloadRequest
    warmup: bool
    arrival_time: float
    ended: SimpleQueue[Flight]
    parent_id: str | None = None  # the prompt whose sample it is; None for the only one of its prompt
    # An event is taken apart at once, into arrays and a text that the garbage collector need not look through: thousands of
    # events, or of numbers in lists, for as long as the requests run would make it hold up the target's thread.
    emission_times: array[float] = field(default_factory=lambda: array("d"))  # of the events that had tokens
    emission_tokens: array[int] = field(default_factory=lambda: array("q"))
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    text: StringIO = field(default_factory=StringIO)
    last: StreamEvent | None = None  # the one that ended it

    def on_event(self, event: StreamEvent) -> None:
        token_ids = event.token_ids
        if token_ids:
            if len(token_ids) == 1:  # quicker by far than to extend
                self.token_ids.append(token_ids[0])
            else:
                self.token_ids.extend(token_ids)
            self.emission_tokens.append(len(token_ids))
            self.emission_times.append(event.time)
        self.text.write(event.text)
        if event.finish_reason is not None:
            self.last = event
            self.ended.put(self)

    def end(self, time: float, finish_reason: Literal["abort", "error"], error: str | None) -> RequestStats:
        """The record of a request whose target said no last word."""
        self.last = StreamEvent(self.request_id, time, (), "", finish_reason, error)
        return self.stats()

    def stats(self) -> RequestStats:
        """The record of a request that has ended. Tokens are counted by id; an event without any is no delivery."""
        last = self.last
        if last is None or last.finish_reason is None:
            raise RuntimeError(f"request {self.request_id} has not ended")
        counts = last.speculation
        return RequestStats(
            request_id=self.request_id,
            index=self.request.index,
            warmup=self.warmup,
            status=_STATUS[last.finish_reason],
            finish_reason=last.finish_reason,
            error=last.error,
            arrival_time=self.arrival_time,
            scheduled_time=last.scheduled_time,
            emission_times=tuple(self.emission_times),
            emission_tokens=tuple(self.emission_tokens),
            finish_time=last.time,
            num_prompt_tokens=last.num_prompt_tokens,
            num_output_tokens=len(self.token_ids),
            num_cached_tokens=last.num_cached_tokens,
            num_preemptions=last.num_preemptions,
            prompt=self.request.prompt.text,
            text=self.text.getvalue(),
            token_ids=tuple(self.token_ids),
            parent_id=self.parent_id,
            priority=self.request.priority,
            num_rounds=counts.num_rounds if counts else None,
            num_draft_tokens=counts.num_draft_tokens if counts else None,
            num_accepted_tokens=counts.num_accepted_tokens if counts else None,
        )


def flights_of(
    request_id: str, request: WorkloadRequest, arrival_time: float, ended: SimpleQueue[Flight], *, warmup: bool = False
) -> dict[str, Flight]:
    """The requests that a prompt's samples are, by the ids of their events; each arrives when the prompt does."""
    n = request.sampling.n
    parent_id = request_id if n > 1 else None
    return {key: Flight(key, request, warmup, arrival_time, ended, parent_id) for key in sample_ids(request_id, n)}


def under_way(flights: Collection[Flight]) -> UnderWay:
    """What can be told of requests before they end."""
    ttft, tpot = [], []
    for flight in flights:
        times = flight.emission_times
        if flight.warmup or not times:
            continue
        # Read once each, the tokens first: the target's thread may add a delivery meanwhile.
        num_tokens, last, first = len(flight.token_ids), times[-1], times[0]
        ttft.append((first - flight.arrival_time) * 1e3)
        so_far = tpot_ms_between(first, last, num_tokens) if last > first else None
        if so_far is not None:
            tpot.append(so_far)
    return UnderWay(len(flights), ttft, tpot)
