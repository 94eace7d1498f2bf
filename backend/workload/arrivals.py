"""When the requests of a workload arrive, in seconds after its start."""

from __future__ import annotations

import numpy as np

from backend.workload.draws import Purpose, uniforms
from backend.workload.spec import Arrivals, ClosedLoop, ConstantRate, PoissonRate


def arrival_times(arrivals: Arrivals, num_requests: int, seed: int) -> list[float] | None:
    """One time per request, never decreasing, the first at 0; None for a closed loop, where ends decide.

    Constant: request i at i / rate. Poisson: gaps are independent and exponential with mean 1 / rate. They are not
    rescaled so that the last arrival falls on n / rate, as vLLM's benchmark does: rescaled gaps depend on each other
    and on n, so the process would no longer be Poisson, and a longer run would not begin like a shorter one. The rate
    that a short run really sees therefore varies by chance, by about 1 / sqrt(n).
    """
    if isinstance(arrivals, ClosedLoop):
        return None
    if isinstance(arrivals, ConstantRate):
        return [index / arrivals.rate for index in range(num_requests)]
    if isinstance(arrivals, PoissonRate):
        gaps = -np.log1p(-uniforms(seed, Purpose.ARRIVALS, max(0, num_requests - 1))) / arrivals.rate
        return [0.0, *np.cumsum(gaps).tolist()][:num_requests]
    return [0.0] * num_requests
