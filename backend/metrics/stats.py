"""Records of what happened, the sink they go to, and the formulas of one request. No torch. See `summary` for a run's.

One clock: `time.perf_counter()` in seconds for every `*_time`; durations are in milliseconds where the name says `_ms`.
A value that does not exist is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    num_decode_tokens: int  # computed, drafts among them whether they were accepted or not
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
    index: int  # its prompt's position in the workload; warm-up requests count from 0 on their own
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
    priority: int = 0  # as it was asked for; lower first, where the target heeds it
    # Of speculation, counted by what was delivered; None without it. Rounds are steps in which something was drafted for it.
    num_rounds: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None  # drafted ones that are part of the output


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
    num_requests: int  # measured requests, each sample of a prompt one, warm-up excluded


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
    ttft_ms_by_priority: Mapping[str, Distribution] | None  # of each number in use, lowest first; None for a single one
    tpot_ms: Distribution
    itl_ms: Distribution
    e2el_ms: Distribution
    kv_cache_usage_max: float | None
    preemptions: int | None
    # Of the preempted requests, those whose KV went to host memory, and what was copied; None where nothing was.
    preemptions_swapped: int | None
    swapped_out_bytes: int | None
    swapped_in_bytes: int | None
    prefix_cache_hit_rate: float | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    peak_memory_bytes: int | None


def summary_to_dict(summary: RunSummary) -> dict[str, Any]:
    """Nested plain data for JSON: what does not exist is None, never NaN."""
    return asdict(summary)


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


# Formulas of one request. Times are read when the target hands an output over, not when a page shows it.


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


def _ms_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


def _first(times: Sequence[float]) -> float | None:
    return times[0] if times else None
