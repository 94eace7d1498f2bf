"""Every figure of a run, from the records of its requests and steps. No torch.

A value that does not exist is None. Percentiles interpolate linearly, `std` is the population's (numpy's defaults).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from backend.metrics.stats import (
    Distribution,
    RequestStats,
    RunSummary,
    StepStats,
    e2el_ms,
    itl_ms,
    meets_slo,
    tpot_ms,
    ttft_ms,
)


@dataclass(slots=True)
class SwapTotals:
    """What preempted requests moved to host memory and back, added up over steps."""

    num_preemptions: int = 0
    out_bytes: int = 0
    in_bytes: int = 0

    def add(self, step: StepStats) -> None:
        self.num_preemptions += step.num_swapped
        num_blocks = step.num_swapped_out_blocks + step.num_swapped_in_blocks
        if num_blocks:
            bytes_per_block = step.swapped_bytes // num_blocks  # blocks are of one size
            self.out_bytes += step.num_swapped_out_blocks * bytes_per_block
            self.in_bytes += step.num_swapped_in_blocks * bytes_per_block


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
    swapped: SwapTotals | None = None,
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
    moved = swapped if swapped != SwapTotals() else None
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
        ttft_ms_by_priority=_by_priority(measured),
        tpot_ms=distribution(tpot_ms(request) for request in finished),
        itl_ms=distribution(gap for request in finished for gap in itl_ms(request)),
        e2el_ms=distribution(e2el_ms(request) for request in finished),
        kv_cache_usage_max=kv_cache_usage_max,
        preemptions=_sum_known(request.num_preemptions for request in measured),
        preemptions_swapped=moved.num_preemptions if moved else None,
        swapped_out_bytes=moved.out_bytes if moved else None,
        swapped_in_bytes=moved.in_bytes if moved else None,
        prefix_cache_hit_rate=_hit_rate(measured),
        draft_acceptance_rate=draft_acceptance_rate(finished),
        mean_acceptance_length=mean_acceptance_length(finished),
        peak_memory_bytes=peak_memory_bytes,
    )


def _by_priority(measured: Sequence[RequestStats]) -> dict[str, Distribution] | None:
    """TTFT of the finished requests of each class; a class is there even if it has none. Keys are text, as JSON's are."""
    classes = sorted({request.priority for request in measured})
    if len(classes) < 2:
        return None
    return {
        str(priority): distribution(
            ttft_ms(request) for request in measured if request.priority == priority and request.status == "finished"
        )
        for priority in classes
    }


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


def draft_acceptance_rate(requests: Iterable[RequestStats]) -> float | None:
    """Accepted / drafted tokens, 0..1; None where nothing was drafted."""
    drafted = [it for it in requests if it.num_draft_tokens]
    num_drafted = sum(it.num_draft_tokens or 0 for it in drafted)
    return sum(it.num_accepted_tokens or 0 for it in drafted) / num_drafted if num_drafted else None


def mean_acceptance_length(requests: Iterable[RequestStats]) -> float | None:
    """1 + accepted tokens / rounds; None where there was no round.

    The 1 is the target's own token of a round. A round that ends its request counts it even where a stop came before it, since
    a request's record does not say how many tokens its rounds delivered: at most one token a request too many.
    """
    speculated = [it for it in requests if it.num_rounds]
    num_rounds = sum(it.num_rounds or 0 for it in speculated)
    return 1 + sum(it.num_accepted_tokens or 0 for it in speculated) / num_rounds if num_rounds else None


def _sum_known(values: Iterable[int | None]) -> int | None:
    """The sum of the values a target could tell; None when it could tell none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
