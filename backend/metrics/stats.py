"""Records of what happened, the sink they go to, and every formula computed from them. No torch.

One clock: `time.perf_counter()` in seconds for every `*_time`; durations are in milliseconds where the name says `_ms`.
A value that does not exist is None. Percentiles interpolate linearly, `std` is the population's (numpy's defaults).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

from backend.metrics.definitions import DEFINITIONS as DEFINITIONS  # the same formulas in words, for pages and CLI

RunStatus = Literal["queued", "loading", "running", "finished", "failed", "cancelled", "interrupted"]
FINAL_STATUSES: frozenset[str] = frozenset({"finished", "failed", "cancelled", "interrupted"})


@dataclass(slots=True)
class StepStats:
    """One engine iteration; scalars only. Nobody changes one; it is not frozen because the step loop builds it.

    With asynchronous scheduling the host schedules the next step and processes the last one while the device runs this one.
    Durations count no time twice: `duration_ms` is what passed since this step began to be scheduled or the step before it
    ended, whichever was later, so the steps of a busy engine add up to the time they took. Its parts may lie beside those
    of its neighbours, and then they add up to more than it; without asynchronous scheduling they add up to it.

    Block counts are as they stood while it ran, before requests that ended in it gave theirs back: their maximum is the
    pool's. Requests running and waiting are counted after it.
    """

    step: int  # counts from 0 within a run, warm-up included
    end_time: float
    duration_ms: float
    schedule_ms: float  # the host chose the step's tokens
    execute_ms: float  # from its submission, or the result before it if that came later, to its result
    process_ms: float  # from its result to its end: text, records
    num_scheduled_requests: int
    num_prefill_tokens: int  # prompt tokens computed, recomputation after a preemption included
    num_decode_tokens: int
    num_output_tokens: int  # tokens emitted by this step
    num_running: int
    num_waiting: int
    num_preempted: int  # requests preempted in this step
    num_referenced_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    # Of the requests preempted in this step, those whose KV went to host memory; the others have to be computed again.
    num_swapped: int = 0
    num_swapped_out_blocks: int = 0  # copied to host memory
    num_swapped_in_blocks: int = 0  # copied back
    swapped_bytes: int = 0  # both ways

    @property
    def start_time(self) -> float:
        return self.end_time - self.duration_ms / 1e3

    @property
    def kv_cache_usage(self) -> float:
        """Referenced / usable blocks, 0..1."""
        total = self.num_referenced_blocks + self.num_evictable_blocks + self.num_free_blocks
        return self.num_referenced_blocks / total if total else 0.0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request from arrival to end. What a target cannot tell is None."""

    request_id: str
    index: int  # position in the workload; warm-up requests count from 0 on their own
    warmup: bool
    status: Literal["finished", "failed", "cancelled"]
    finish_reason: Literal["stop", "length", "abort", "error"]
    error: str | None
    arrival_time: float
    scheduled_time: float | None  # first time any of its tokens ran
    emission_times: tuple[float, ...]  # when output was delivered, one entry per delivery
    emission_tokens: tuple[int, ...]  # tokens in each delivery; a final EOS or stop token is not delivered
    finish_time: float
    num_prompt_tokens: int | None
    num_output_tokens: int  # sum of emission_tokens
    num_cached_tokens: int | None
    num_preemptions: int | None
    prompt: str | None
    text: str | None
    token_ids: tuple[int, ...] | None
    parent_id: str | None = None  # the prompt whose sample it is; None for the only one of its prompt


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What the engine's memory holds now, in bytes; None where it cannot be told."""

    weights_bytes: int | None
    kv_cache_bytes: int | None
    device_memory_bytes: int | None  # allocated on the card by this process; None on the CPU
    peak_memory_bytes: int | None  # the most since the model was loaded


@dataclass(frozen=True, slots=True)
class TelemetrySample:
    """Memory and load of machine and card at one moment, sampled outside the step loop."""

    time: float
    host_memory_bytes: int  # resident set of this process
    device_memory_bytes: int | None  # allocated on the card by this process
    weights_bytes: int | None
    kv_cache_bytes: int | None
    cpu_percent: float | None  # of this process, 100 = one core
    gpu_percent: float | None
    gpu_power_w: float | None


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known once the target is ready and before the first request, warm-up included."""

    start_time: float  # the run's zero: times are stored and shown relative to it
    resolved_config: Mapping[str, Any]
    environment: Mapping[str, Any]
    load: Mapping[str, Any]  # seconds, bytes, parameters, num_blocks, what came from where
    notices: tuple[str, ...]  # what the engine decided otherwise than asked, one sentence each
    cache_state: Mapping[str, Any]  # {"state": "cold" | "warm", "num_cached_tokens": int}
    num_requests: int  # measured requests, warm-up excluded


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample of one metric; every field but `count` is None when the sample is empty."""

    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run, warm-up left out. Scripts rely on these names."""

    num_requests: int
    num_failed: int
    duration_s: float
    input_tokens: int | None
    output_tokens: int
    output_throughput_tok_s: float | None
    total_throughput_tok_s: float | None
    request_throughput_req_s: float | None
    goodput_req_s: float | None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2el_ms: Distribution
    kv_cache_usage_max: float | None
    preemptions: int | None
    prefix_cache_hit_rate: float | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended; a summary where any request was measured, an error where something went wrong."""

    status: RunStatus  # one of FINAL_STATUSES
    end_time: float
    summary: RunSummary | None = None  # of what was measured until then; None when no request was sent
    error: str | None = None  # why it failed; of a finished run, how many requests failed and why the first did


@dataclass(frozen=True, slots=True)
class Phase:
    """What a run is doing now, in words a person reads: "pulling", "loading", "warming up", "running", "writing"."""

    name: str
    done: float | None = None  # of `total`, in `unit`; None where progress cannot be told
    total: float | None = None
    unit: str = ""


class StatsSink(Protocol):
    """Receives a run's records. Calls come from several threads (engine, driver, sampler) and must return at once.

    Order: `on_phase` from the moment the run is taken up; `on_run_start` once, when the target is ready and before the
    warm-up; then steps, chunks, requests and samples as they happen; `on_run_end` exactly once, as the last call. A run
    that fails or is cancelled before its target is ready has an end without a start.

    Time zero is `RunStart.start_time`, just before the warm-up: no step, request or sample lies before it. The measured
    part begins at the earliest `arrival_time` of a request that is not `warmup`; a step belongs to it when its
    `start_time` is not before that. Only such steps and requests enter the summary.
    """

    def on_run_start(self, start: RunStart) -> None: ...
    def on_phase(self, phase: Phase) -> None: ...
    def on_step(self, stats: StepStats) -> None: ...
    def on_request_finished(self, stats: RequestStats) -> None: ...
    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        """A piece of a ledger covering steps `first_step..last_step` inclusive.

        `encode` compresses it, which takes milliseconds: a sink that wants the bytes calls it on a thread of its own.
        """

    def on_sample(self, sample: TelemetrySample) -> None: ...
    def on_run_end(self, end: RunEnd) -> None: ...


# Formulas, per request. Times are read when the target hands an output over, not when a page shows it.


def queue_ms(stats: RequestStats) -> float | None:
    """From arrival to the first step that ran any of the request's tokens."""
    return _ms_between(stats.arrival_time, stats.scheduled_time)


def prefill_ms(stats: RequestStats) -> float | None:
    """From that step's start to the first delivery; queue and prefill add up to TTFT."""
    return _ms_between(stats.scheduled_time, _first(stats.emission_times))


def ttft_ms(stats: RequestStats) -> float | None:
    """Time to first token: arrival to the first delivery, queueing included."""
    return _ms_between(stats.arrival_time, _first(stats.emission_times))


def e2el_ms(stats: RequestStats) -> float | None:
    """End-to-end latency: arrival to the last delivery."""
    return _ms_between(stats.arrival_time, _first(stats.emission_times[::-1]))


def tpot_ms(stats: RequestStats) -> float | None:
    """Time per output token after the first: (last - first delivery) / (output tokens - 1).

    None with fewer than two tokens or fewer than two deliveries: no time between tokens was seen then, and a 0 would
    lower every mean and meet every limit.
    """
    if len(stats.emission_times) <= 1:
        return None
    return tpot_ms_between(stats.emission_times[0], stats.emission_times[-1], stats.num_output_tokens)


def tpot_ms_between(first: float, last: float, num_tokens: int) -> float | None:
    """TPOT of `num_tokens` delivered from `first` to `last`, so far or in all."""
    return (last - first) * 1e3 / (num_tokens - 1) if num_tokens > 1 else None


def itl_ms(stats: RequestStats) -> list[float]:
    """Inter-token latencies: the gaps between deliveries; a delivery of several tokens is one gap."""
    return [(later - earlier) * 1e3 for earlier, later in pairwise(stats.emission_times)]


def meets_slo(stats: RequestStats, limits: Mapping[str, float]) -> bool:
    """Whether a finished request has every limited metric ("ttft_ms", "tpot_ms") and none above its limit."""
    values = {"ttft_ms": ttft_ms(stats), "tpot_ms": tpot_ms(stats)}
    measured = [(values[name], limit) for name, limit in limits.items()]
    return stats.status == "finished" and all(value is not None and value <= limit for value, limit in measured)


# Formulas, per run.


def distribution(values: Iterable[float | None]) -> Distribution:
    """Mean, population std and linearly interpolated percentiles of the values that exist."""
    import numpy as np  # here, so that commands which only list or configure runs start without it

    sample = np.array([value for value in values if value is not None], dtype=np.float64)
    if sample.size == 0:
        return Distribution()
    p50, p90, p95, p99 = (float(value) for value in np.percentile(sample, (50, 90, 95, 99)))
    mean, std = float(sample.mean()), float(sample.std())
    return Distribution(mean, std, p50, p90, p95, p99, float(sample.min()), float(sample.max()), int(sample.size))


def measured_duration_s(requests: Iterable[RequestStats]) -> float:
    """From the first arrival to the last delivery or end, over the measured requests; 0 when there are none."""
    measured = [request for request in requests if not request.warmup]
    if not measured:
        return 0.0
    start = min(request.arrival_time for request in measured)
    return max(0.0, max(max((*request.emission_times, request.finish_time)) for request in measured) - start)


def summarize(
    requests: Sequence[RequestStats],
    *,
    slo_limits: Mapping[str, float],
    kv_cache_usage_max: float | None = None,
    peak_memory_bytes: int | None = None,
) -> RunSummary:
    """The figures of a run, warm-up left out. Only finished requests enter tokens, rates and latencies."""
    measured = [request for request in requests if not request.warmup]
    finished = [request for request in measured if request.status == "finished"]
    duration_s = measured_duration_s(measured)

    def rate(amount: float | None) -> float | None:
        return amount / duration_s if amount is not None and finished and duration_s > 0 else None

    input_tokens = _input_tokens(finished)
    output_tokens = sum(request.num_output_tokens for request in finished)
    good = sum(meets_slo(request, slo_limits) for request in measured) if slo_limits else None
    return RunSummary(
        num_requests=len(measured),
        num_failed=sum(request.status == "failed" for request in measured),
        duration_s=duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        output_throughput_tok_s=rate(output_tokens),
        total_throughput_tok_s=rate(None if input_tokens is None else input_tokens + output_tokens),
        request_throughput_req_s=rate(len(finished)),
        goodput_req_s=rate(good),
        ttft_ms=distribution(ttft_ms(request) for request in finished),
        tpot_ms=distribution(tpot_ms(request) for request in finished),
        itl_ms=distribution(gap for request in finished for gap in itl_ms(request)),
        e2el_ms=distribution(e2el_ms(request) for request in finished),
        kv_cache_usage_max=kv_cache_usage_max,
        preemptions=_sum_known(request.num_preemptions for request in measured),
        prefix_cache_hit_rate=_hit_rate(measured),
        draft_acceptance_rate=None,
        mean_acceptance_length=None,
        peak_memory_bytes=peak_memory_bytes,
    )


def summary_to_dict(summary: RunSummary) -> dict[str, Any]:
    """Nested plain data for JSON: what does not exist is None, never NaN."""
    return asdict(summary)


def _input_tokens(requests: Sequence[RequestStats]) -> int | None:
    """Of each prompt once: its samples are requests of their own."""
    alone = [request.num_prompt_tokens for request in requests if request.parent_id is None]
    sampled = {request.parent_id: request.num_prompt_tokens for request in requests if request.parent_id is not None}
    return _sum_known([*alone, *sampled.values()])


def _hit_rate(requests: Iterable[RequestStats]) -> float | None:
    """Cached / looked up prompt tokens of the requests that looked; None where none did."""
    looked_up = [it for it in requests if it.num_cached_tokens is not None and it.num_prompt_tokens]
    num_tokens = sum(it.num_prompt_tokens or 0 for it in looked_up)
    return sum(it.num_cached_tokens or 0 for it in looked_up) / num_tokens if num_tokens else None


def _ms_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


def _first(times: Sequence[float]) -> float | None:
    return times[0] if times else None


def _sum_known(values: Iterable[int | None]) -> int | None:
    """The sum of the values a target could tell; None when it could tell none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
