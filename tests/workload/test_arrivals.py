"""Arrivals against their closed forms and, for Poisson, against the distributions they must have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from backend.workload.arrivals import arrival_times
from backend.workload.spec import AllAtOnce, ClosedLoop, ConstantRate, PoissonRate


def poisson(rate: float, count: int, seed: int) -> list[float]:
    times = arrival_times(PoissonRate(rate=rate), count, seed)
    assert times is not None
    return times


def test_all_at_once():
    assert arrival_times(AllAtOnce(), 3, seed=0) == [0.0, 0.0, 0.0]


def test_constant():
    assert arrival_times(ConstantRate(rate=4.0), 4, seed=0) == [0.0, 0.25, 0.5, 0.75]


def test_closed_loop_has_no_times():
    assert arrival_times(ClosedLoop(concurrency=2), 3, seed=0) is None


def test_poisson_is_reproducible_and_depends_on_the_seed():
    assert poisson(4.0, 50, seed=7) == poisson(4.0, 50, seed=7)
    assert poisson(4.0, 50, seed=7) != poisson(4.0, 50, seed=8)
    assert poisson(4.0, 50, seed=7)[:3] == pytest.approx([0.0, 0.922556, 1.462322], abs=1e-6)  # for good


def test_poisson_begins_alike_whatever_its_length_and_scales_with_the_rate():
    long = poisson(4.0, 100, seed=3)
    assert poisson(4.0, 40, seed=3) == long[:40]
    assert poisson(8.0, 100, seed=3) == pytest.approx([time / 2 for time in long])
    assert (poisson(4.0, 1, seed=3), poisson(4.0, 0, seed=3)) == ([0.0], [])


def test_poisson_gaps_are_exponential_and_independent():
    times = poisson(5.0, 20_001, seed=0)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert stats.kstest(gaps, "expon", args=(0, 1 / 5.0)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_poisson_counts_per_second_are_poisson():
    times = np.array(poisson(5.0, 20_001, seed=1))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(5.0, rel=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)
    edges = np.arange(12)
    observed = np.array([*(np.sum(counts == k) for k in edges), np.sum(counts > edges[-1])])
    expected = np.array([*stats.poisson.pmf(edges, 5.0), stats.poisson.sf(edges[-1], 5.0)]) * counts.size
    assert stats.chisquare(observed, expected).pvalue > 0.01


def test_rates_survive_many_seeds():
    lasts = [poisson(10.0, 101, seed)[-1] for seed in range(200)]
    assert np.mean(lasts) == pytest.approx(10.0, rel=0.03)  # 100 gaps at 10 per second
    assert len(set(lasts)) == 200
