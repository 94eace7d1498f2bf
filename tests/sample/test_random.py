from __future__ import annotations

import numpy as np
from scipy import stats

from backend.sample.random import Purpose, philox4x32, uniform


def test_philox_gives_the_published_known_answers() -> None:
    """The known-answer vectors of the Random123 library for philox4x32 with ten rounds."""
    ones = 0xFFFFFFFF
    counters = [[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]]
    keys = [[0] * 2, [ones] * 2, [0xA4093822, 0x299F31D0]]
    words = philox4x32(np.array(counters, dtype=np.uint32).T, np.array(keys, dtype=np.uint32).T)
    assert [[f"{word:08x}" for word in row] for row in words.T.tolist()] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]


def test_draws_are_uniform_and_independent_of_each_other() -> None:
    draws = uniform([0] * 20_000, list(range(20_000)), Purpose.TOKEN)
    assert stats.kstest(draws, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    across_seeds = uniform(list(range(20_000)), [3] * 20_000, Purpose.TOKEN)
    assert stats.kstest(across_seeds, "uniform").pvalue > 1e-4


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    batch = uniform([1, 2, 2**63 - 1], [0, 5, 2**33], Purpose.TOKEN)
    for row, (seed, position) in enumerate([(1, 0), (2, 5), (2**63 - 1, 2**33)]):
        assert uniform([seed], [position], Purpose.TOKEN)[0] == batch[row]
    assert len(set(batch.tolist())) == 3


def test_a_draw_is_the_first_53_bits_of_its_words() -> None:
    """Seed and position go in low word first, and the purpose after them."""
    seed, position = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    counter = np.array([[0x76543210], [0xFEDCBA98], [Purpose.TOKEN], [0]], dtype=np.uint32)
    high, low = philox4x32(counter, np.array([[0x89ABCDEF], [0x01234567]], dtype=np.uint32))[:2, 0].tolist()
    assert uniform([seed], [position], Purpose.TOKEN).tolist() == [((high << 32 | low) >> 11) / 2**53]


def test_of_no_rows() -> None:
    assert uniform([], [], Purpose.TOKEN).shape == (0,)
