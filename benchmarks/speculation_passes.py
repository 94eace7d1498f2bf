"""`Passes`: one proposer over the same requests, some of them at a time, and the speed at which each request decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backend.errors import EngineError
from backend.metrics.stats import RequestStats
from backend.workload.datasets import WorkloadRequest
from benchmarks.model_figures import WARM_UP_SHARE, mix_rate
from benchmarks.passes import BenchmarkEngine


@dataclass(frozen=True, slots=True)
class Passes:
    """All passes of one proposer with one number of requests; `requests` and `run_id` are of the one with the median speed."""

    request_tok_s: list[float]
    output_tok_s: list[float]
    requests: list[RequestStats]
    run_id: int


def request_rate(requests: Sequence[RequestStats]) -> float | None:
    """Tokens behind the first ones, by the time between the first and the last of each; None where there are none."""
    several = [request for request in requests if request.num_output_tokens > 1]
    seconds = sum(request.emission_times[-1] - request.emission_times[0] for request in several)
    return sum(request.num_output_tokens - 1 for request in several) / seconds if seconds > 0 else None


def _num_warm_up_tokens(request: WorkloadRequest) -> int:
    return max(2, request.sampling.max_tokens // WARM_UP_SHARE)


def measure_passes(
    engine: BenchmarkEngine, requests: Sequence[WorkloadRequest], concurrency: int, repeats: int
) -> Passes:
    """Recorded passes after a short one that warms up. Raises `ServeLabError`."""
    short = [
        replace(each, sampling=each.sampling.model_copy(update={"max_tokens": _num_warm_up_tokens(each)}))
        for each in requests
    ]
    engine.finish(short, recorded=True, concurrency=concurrency)
    passes: list[tuple[float, list[RequestStats], int]] = []
    for _ in range(repeats):
        finished = engine.finish(requests, recorded=True, concurrency=concurrency)
        rate = request_rate(finished)
        if rate is None:
            raise EngineError("no answer has a second token, so that there is no speed of decoding")
        assert engine.run_id is not None
        passes.append((rate, finished, engine.run_id))
    _, of_median, run_id = sorted(passes, key=lambda each: each[0])[(repeats - 1) // 2]
    return Passes([rate for rate, _, _ in passes], [mix_rate(finished) for _, finished, _ in passes], of_median, run_id)
