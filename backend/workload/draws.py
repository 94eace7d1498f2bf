"""Random numbers of a workload: every stream is fixed by (seed, purpose), and its first n draws do not depend on n.

Draws come from PCG64 (O'Neill, 2014) as raw 64-bit words, which numpy keeps the same in every release; distributions
are made from them here, since numpy's own may change between releases, and by inversion where that is possible: one word per
value. Streams of different purposes are independent: more requests, other lengths or another arrival process leave the
rest as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import IntEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from backend.workload.spec import Length, NormalLength, UniformLength


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every workload's meaning: never reuse one."""

    PROMPT_IDS = 0
    PROMPT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    ARRIVALS = 3
    PREFIX_IDS = 4
    GAMMA_PROPOSALS = 5
    GAMMA_ACCEPTANCE = 6
    TURN_COUNTS = 7
    TURN_LENGTHS = 8
    THINK_TIMES = 9
    BLOCK_IDS = 10
    PRIORITIES = 11


def uniforms(seed: int, purpose: Purpose, count: int, *, index: int = 0, warmup: bool = False) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) of one stream; `index` tells apart the streams of several requests or groups."""
    generator = np.random.PCG64(np.random.SeedSequence([seed, int(purpose), int(warmup), index]))
    words = np.asarray(generator.random_raw(count), dtype=np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_ids(
    vocab_size: int, seed: int, purpose: Purpose, count: int, *, index: int = 0, warmup: bool = False
) -> tuple[int, ...]:
    """`count` ids, uniform over 0 <= id < vocab_size. Special ids occur among them: in a prompt they end nothing."""
    draws = uniforms(seed, purpose, count, index=index, warmup=warmup)
    return tuple((draws * vocab_size).astype(np.int64).tolist())


def lengths(
    length: Length, seed: int, purpose: Purpose, count: int, *, index: int = 0, warmup: bool = False
) -> list[int]:
    """`count` lengths in tokens: fixed, uniform over min..max inclusive, or normal, rounded and cut to min..max."""
    if isinstance(length, int):
        return [length] * count
    if isinstance(length, UniformLength):
        draws = uniforms(seed, purpose, count, index=index, warmup=warmup)
        return (length.min + (draws * (length.max - length.min + 1)).astype(np.int64)).tolist()
    if isinstance(length, NormalLength):
        draws = uniforms(seed, purpose, count, index=index, warmup=warmup)
        values = [round(length.mean + length.std * value) for value in _standard_normal(draws).tolist()]
        return [min(max(value, length.min), length.max) for value in values]
    return [length.value] * count


def priorities(weights: Mapping[int, float], seed: int, count: int, *, warmup: bool = False) -> list[int]:
    """`count` numbers, each as likely as its share of the weights; all 0 without weights."""
    if not weights:
        return [0] * count
    numbers = sorted(weights)
    shares = np.cumsum([weights[number] for number in numbers])
    draws = uniforms(seed, Purpose.PRIORITIES, count, warmup=warmup)
    return [numbers[place] for place in np.searchsorted(shares / shares[-1], draws, side="right").tolist()]


def exponentials(
    seed: int, purpose: Purpose, count: int, *, index: int = 0, warmup: bool = False
) -> NDArray[np.float64]:
    """`count` exponential numbers of mean 1."""
    return -np.log1p(-uniforms(seed, purpose, count, index=index, warmup=warmup))


def gammas(shape: float, seed: int, count: int) -> NDArray[np.float64]:
    """`count` gamma numbers of this shape and mean 1.

    Marsaglia and Tsang (2000): a transformed normal is accepted or drawn again, at least 19 times in 20 the first. Each
    round has streams of its own, so a number depends on its place alone. Below a shape of 1, a number of shape + 1 is
    multiplied by a uniform one to the power of 1 / shape.
    """
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    values, open_, attempt = np.zeros(count), np.arange(count), 0
    while open_.size:
        normal = _standard_normal(uniforms(seed, Purpose.GAMMA_PROPOSALS, count, index=attempt)[open_])
        accept = uniforms(seed, Purpose.GAMMA_ACCEPTANCE, count, index=attempt)[open_]
        v = (1 + normal / np.sqrt(9 * d)) ** 3
        positive = v > 0
        safe = np.where(positive, v, 1.0)
        accepted = positive & (np.log1p(-accept) < normal**2 / 2 + d * (1 - safe + np.log(safe)))
        values[open_[accepted]] = d * v[accepted]
        open_, attempt = open_[~accepted], attempt + 1
    if shape < 1:
        values *= (1 - uniforms(seed, Purpose.ARRIVALS, count)) ** (1 / shape)
    return values / shape


def _standard_normal(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(draw) for draw in np.maximum(draws, 2.0**-53).tolist()])  # the inverse has no value at 0


def request_seed(seed: int, index: int, *, warmup: bool = False) -> int:
    """The sampling seed of a request, 0 <= seed < 2**63.

    The first 8 bytes, big-endian, of the SHA-256 of "request:<seed>:<index>" ("warmup:..." for a warm-up request),
    without the lowest bit: a hash of the place in the workload, so no request shares or shifts another's draws.
    """
    text = f"{'warmup' if warmup else 'request'}:{seed}:{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
