"""Arrivals against their closed forms and, for Poisson, against the distributions they must have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from backend.workload.arrivals import arrival_times
from backend.workload.draws import gammas
from backend.workload.spec import AllAtOnce, ClosedLoop, ConstantRate, GammaRate, PoissonRate, TraceTimes


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("arrivals", [ConstantRate, PoissonRate, GammaRate])
def test_the_lowest_rate_gives_times(arrivals: type[ConstantRate | PoissonRate | GammaRate]):
    settings = {"burstiness": 1e-3} if arrivals is GammaRate else {}
    times = arrival_times(arrivals(rate=1e-9, **settings), 1000, 0)
    assert times is not None
    assert np.isfinite(times).all()
    assert times[-1] > 1e11


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


def gamma_gaps(burstiness: float, count: int, seed: int, rate: float = 5.0) -> np.ndarray:
    times = arrival_times(GammaRate(rate=rate, burstiness=burstiness), count + 1, seed)
    assert times is not None
    return np.diff(times)


@pytest.mark.parametrize("burstiness", [0.1, 0.5, 1.0, 1.5, 4.0, 100.0])
def test_gamma_gaps_have_the_rate_and_the_spread_that_were_asked_for(burstiness: float):
    """Both within four standard errors; that of the coefficient of variation is the delta method's for a gamma sample."""
    count = 40_000
    gaps = gamma_gaps(burstiness, count, seed=2)
    spread = 1 / np.sqrt(burstiness)
    assert abs(gaps.mean() * 5.0 - 1) < 4 * spread / np.sqrt(count)
    assert abs(gaps.std() / gaps.mean() / spread - 1) < 4 * np.sqrt((0.5 + 0.5 / burstiness) / count)
    # Drawn gaps: differences of times have lost those of a millionth of a millionth, which are common in bursts.
    drawn = gammas(burstiness, 2, count)
    assert gaps == pytest.approx(drawn / 5, abs=1e-9)
    assert stats.kstest(drawn, "gamma", args=(burstiness, 0, 1 / burstiness)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(count)


def test_gamma_of_burstiness_one_is_poisson():
    gaps = gamma_gaps(1.0, 20_000, seed=3)
    assert stats.ks_2samp(gaps, np.diff(poisson(5.0, 20_001, seed=4))).pvalue > 0.01
    assert stats.ks_2samp(gamma_gaps(1.3, 20_000, seed=3), gaps).pvalue < 1e-6  # the test can tell


def test_gamma_is_reproducible_begins_alike_and_depends_on_the_seed():
    for burstiness in (0.3, 1.0, 7.0):
        gaps = gamma_gaps(burstiness, 2000, seed=5)
        assert (gaps == gamma_gaps(burstiness, 2000, seed=5)).all()
        assert (gaps != gamma_gaps(burstiness, 2000, seed=6)).mean() > 0.99
        assert (gaps[:30] == gamma_gaps(burstiness, 30, seed=5)).all()
        assert gamma_gaps(burstiness, 2000, seed=5, rate=10.0) == pytest.approx(gaps / 2)
    first = arrival_times(GammaRate(rate=4.0, burstiness=0.5), 4, seed=7)
    assert first == pytest.approx([0.0, 0.0000169, 0.0113172, 0.3662608], abs=1e-7)  # for good
    assert arrival_times(GammaRate(rate=4.0), 0, seed=7) == []


@pytest.mark.parametrize("burstiness", [1e-3, 1e6])
def test_gamma_at_the_ends_of_its_range(burstiness: float):
    gaps = gamma_gaps(burstiness, 1000, seed=1)
    assert np.isfinite(gaps).all()
    assert (gaps >= 0).all()
    if burstiness > 1:
        assert gaps == pytest.approx([0.2] * 1000, rel=0.01)


def test_times_of_a_trace_begin_at_zero_and_speed_up():
    assert arrival_times(TraceTimes(), 3, 0, [2.0, 2.5, 9.0]) == [0.0, 0.5, 7.0]
    assert arrival_times(TraceTimes(speedup=2.0), 3, 9, [2.0, 2.5, 9.0]) == [0.0, 0.25, 3.5]
    assert arrival_times(TraceTimes(), 0, 0, []) == []
