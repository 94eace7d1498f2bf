"""Records of what happened, the sink they go to, and every formula computed from them. No torch.

One clock: `time.perf_counter()` in seconds for every `*_time`; durations are in milliseconds where the name says `_ms`.
A value that does not exist is None. Percentiles are linearly interpolated, `std` is the population's (numpy's defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

RunStatus = Literal["queued", "loading", "running", "finished", "failed", "cancelled", "interrupted"]
FINAL_STATUSES: frozenset[str] = frozenset({"finished", "failed", "cancelled", "interrupted"})


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine iteration; scalars only. Block counts are as they stand after the step."""

    step: int  # counts from 0 within a run, warm-up included
    end_time: float
    duration_ms: float  # schedule + execute + process
    schedule_ms: float
    execute_ms: float
    process_ms: float
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
    """What is known once the target is ready and before the first request."""

    start_time: float
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
    status: RunStatus  # one of FINAL_STATUSES
    end_time: float
    summary: RunSummary | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """What a run is doing now, in words a person reads: "pulling", "loading", "warming up", "running", "writing"."""

    name: str
    done: float | None = None  # of `total`, in `unit`; None where progress cannot be told
    total: float | None = None
    unit: str = ""


class StatsSink(Protocol):
    """Receives a run's records, in order. Calls come from engine and driver threads and must return at once."""

    def on_run_start(self, start: RunStart) -> None: ...
    def on_phase(self, phase: Phase) -> None: ...
    def on_step(self, stats: StepStats) -> None: ...
    def on_request_finished(self, stats: RequestStats) -> None: ...
    def on_chunk(self, kind: str, data: bytes, first_step: int, last_step: int) -> None:
        """A compressed piece of a ledger covering steps `first_step..last_step` inclusive."""

    def on_sample(self, sample: TelemetrySample) -> None: ...
    def on_run_end(self, end: RunEnd) -> None: ...
