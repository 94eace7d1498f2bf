"""When the requests of a workload arrive, in seconds after its start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.workload.draws import Purpose, exponentials, gammas
from backend.workload.spec import Arrivals, ClosedLoop, ConstantRate, GammaRate, PoissonRate, TraceTimes


def arrival_times(
    arrivals: Arrivals, num_requests: int, seed: int, recorded: Sequence[float] = ()
) -> list[float] | None:
    """One time per request, never decreasing, the first at 0; None for a closed loop, where ends decide.

    Constant: request i at i / rate. Poisson: gaps are independent and exponential with mean 1 / rate. Gamma: the same with
    gamma gaps of shape `burstiness`. They are not rescaled so that the last arrival falls on n / rate, as vLLM's benchmark
    does: rescaled gaps depend on each other and on n, so the process would no longer be what it is called, and a longer run
    would not begin like a shorter one. The rate that a short run really sees therefore varies by chance, by about
    1 / sqrt(n x burstiness). Trace: the `recorded` times of the requests, `speedup` times as fast.
    """
    if isinstance(arrivals, ClosedLoop):
        return None
    if isinstance(arrivals, TraceTimes):
        return [(time - recorded[0]) / arrivals.speedup for time in recorded]
    if isinstance(arrivals, ConstantRate):
        return [index / arrivals.rate for index in range(num_requests)]
    if isinstance(arrivals, PoissonRate | GammaRate):
        count = max(0, num_requests - 1)
        gaps = (
            gammas(arrivals.burstiness, seed, count)
            if isinstance(arrivals, GammaRate)
            else exponentials(seed, Purpose.ARRIVALS, count)
        )
        return [0.0, *np.cumsum(gaps / arrivals.rate).tolist()][:num_requests]
    return [0.0] * num_requests
