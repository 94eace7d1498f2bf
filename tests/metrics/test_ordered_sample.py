"""Percentiles of a sample that grows, against numpy's over all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.metrics import ordered_sample
from backend.metrics.ordered_sample import OrderedSample

SHARES = (0.0, 0.25, 0.5, 0.9, 0.99, 1.0)
# Few values, so that many are equal, and any.
numbers = st.lists(st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(-1e6, 1e6)), max_size=60)


def filled(values: list[float]) -> OrderedSample:
    sample = OrderedSample()
    for value in values:
        sample.add(value)
    return sample


@given(numbers, numbers, st.integers(1, 5))
def test_percentiles_are_numpys_over_the_sample_and_the_others(
    values: list[float], others: list[float], max_piece: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ordered_sample, "MAX_PIECE", max_piece)
        sample = filled(values)
    assert len(sample) == len(values)
    ours = sample.percentiles(SHARES, sorted(others))
    if not values and not others:
        assert ours == [None] * len(SHARES)
    else:
        assert ours == pytest.approx(np.percentile([*values, *others], np.multiply(SHARES, 100)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("order", ["rising", "falling", "any"])
def test_no_piece_is_long_whatever_the_order(order: str) -> None:
    values = np.random.default_rng(0).normal(size=20_000)
    if order != "any":
        values = np.sort(values)[:: 1 if order == "rising" else -1]
    sample = filled(values.tolist())
    assert max(len(piece) for piece in sample._pieces) <= ordered_sample.MAX_PIECE
    assert len(sample._pieces) <= 3 * len(values) / ordered_sample.MAX_PIECE
    assert sample.percentiles([0.5, 0.99]) == pytest.approx(np.percentile(values, [50, 99]))
