from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from backend.errors import ConfigError
from backend.experiments.homogeneity import Homogeneity, chi2_tail, compare_samples, pool_cells


@given(chi2=st.floats(0, 3000), degrees=st.integers(1, 2000))
def test_the_tail_of_chi_squared(chi2: float, degrees: int) -> None:
    expected = float(stats.chi2.sf(chi2, degrees))
    assert chi2_tail(chi2, degrees) == pytest.approx(expected, rel=1e-6, abs=1e-200)


def test_without_a_degree_of_freedom_nothing_is_unlikely() -> None:
    same = [(1, 2, 3)] * 20
    found = compare_samples([(same, same)])
    assert (found.num_cells, found.degrees_of_freedom, found.p_value, found.total_variation) == (1, 0, 1.0, 0.0)
    assert not found.rejections


def test_statistics_against_scipy_where_nothing_is_pooled() -> None:
    """Two strata: their χ² and degrees of freedom add up; the total variation is that of stratum and tokens together."""
    tables = [np.array([[30, 50, 20], [40, 30, 30]]), np.array([[60, 40], [45, 55]])]
    strata = [
        tuple([(7, 7, cell) for cell, count in enumerate(row) for _ in range(count)] for row in table)
        for table in tables
    ]
    found = compare_samples([(first, second) for first, second in strata])
    expected = [stats.chi2_contingency(table, correction=False) for table in tables]
    assert found.chi2 == pytest.approx(sum(each.statistic for each in expected))
    assert found.degrees_of_freedom == sum(each.dof for each in expected) == 3
    assert found.p_value == pytest.approx(stats.chi2.sf(found.chi2, 3))
    assert found.total_variation == pytest.approx((10 + 20 + 10 + 15 + 15) / 2 / 200)


def test_rare_sequences_are_pooled_by_their_beginnings() -> None:
    """Ten in both together are a cell; the rest of (1, 2) is one, that of (1,) too, and what is left joins the smallest."""
    first = [(1, 2, 3)] * 12 + [(1, 2, 4)] * 4 + [(1, 2, 5)] * 2 + [(1, 3, 0)] * 3 + [(1, 4, 0)] * 4 + [(2, 0, 0)] * 2
    second = [(1, 2, 3)] * 9 + [(1, 2, 4)] * 3 + [(1, 2, 5)] * 5 + [(1, 3, 0)] * 6 + [(3, 0, 0)] * 4
    # (1, 2, 3) | (1, 2, others) | (1, others) | left: 2 and 4, which join the smallest, (1, others)
    assert pool_cells(first, second) == sorted([(12, 9), (6, 8), (7 + 2, 6 + 4)])
    assert pool_cells([(0, 0, 1)] * 9, [(5, 5, 5)] * 9) == [(9, 9)]


SEQUENCES = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=10, max_size=200)


@given(first=SEQUENCES, data=st.data())
def test_pooling_loses_nothing_and_leaves_no_small_cell(first: list[tuple[int, ...]], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=len(first), max_size=len(first)))
    cells = pool_cells(first, second)
    assert [sum(column) for column in zip(*cells, strict=True)] == [len(first), len(second)]
    assert all(sum(cell) >= 10 for cell in cells)
    assert pool_cells(second, first) == sorted((b, a) for a, b in cells), "it depends on which sample is which"
    frequent = {tokens for tokens, count in Counter([*first, *second]).items() if count >= 10}
    assert len(cells) >= len(frequent)


def test_the_limit_of_total_variation_is_seldom_passed_by_chance() -> None:
    """Two halves of one sample, 20,000 times, at a significance of 0.2: each test may reject one time in ten."""
    generator, num_samples, trials = np.random.default_rng(0), 500, 20_000
    found = compare_samples([([(0, 0, cell % 20) for cell in range(num_samples)],) * 2], significance=0.2)
    counts = generator.multivariate_hypergeometric([50] * 20, num_samples, size=trials)
    distances = np.abs(2 * counts - 50).sum(axis=1) / 2 / num_samples
    assert (distances > found.total_variation_limit).mean() <= 0.1
    assert distances.max() > found.total_variation_limit * 0.8, "the limit is far from what chance gives"


def test_both_tests_can_reject_and_say_why() -> None:
    first, second = [(0, 0, 0)] * 500 + [(1, 1, 1)] * 500, [(0, 0, 0)] * 300 + [(1, 1, 1)] * 700
    found = compare_samples([(first, second)])
    assert len(found.rejections) == 2
    assert found.rejections[0].startswith("χ² = 83.3 at 1 degrees of freedom has p = ")
    assert found.rejections[1].startswith("the total variation is 0.2000, above the ")
    assert isinstance(found, Homogeneity)
    close = compare_samples([(first, [(0, 0, 0)] * 480 + [(1, 1, 1)] * 520)])
    assert not close.rejections


@pytest.mark.parametrize(
    ("strata", "message"),
    [
        ([], "there is nothing to compare"),
        ([([(0,)] * 10, [(0,)] * 11)], "samples of 10 and 11 sequences cannot be compared"),
        ([([(0,)] * 9, [(0,)] * 9)], "9 sequences are too few to compare; 10 are the least"),
    ],
)
def test_samples_that_cannot_be_compared(strata: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare_samples(strata)
