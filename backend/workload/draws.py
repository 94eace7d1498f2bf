"""Random numbers of a workload: every stream is fixed by (seed, purpose), and its first n draws do not depend on n.

Draws come from PCG64 (O'Neill, 2014) as raw 64-bit words, which numpy keeps the same in every release; distributions
are made from them here by inversion, one word per value, since numpy's own may change between releases. Streams of
different purposes are independent: more requests, other lengths or another arrival process leave the rest as it was.
"""

from __future__ import annotations

import hashlib
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


def lengths(length: Length, seed: int, purpose: Purpose, count: int, *, warmup: bool = False) -> list[int]:
    """`count` lengths in tokens: fixed, uniform over min..max inclusive, or normal, rounded and cut to min..max."""
    if isinstance(length, int):
        return [length] * count
    if isinstance(length, UniformLength):
        draws = uniforms(seed, purpose, count, warmup=warmup)
        return (length.min + (draws * (length.max - length.min + 1)).astype(np.int64)).tolist()
    if isinstance(length, NormalLength):
        draws = np.maximum(uniforms(seed, purpose, count, warmup=warmup), 2.0**-53)  # the inverse has no value at 0
        standard = NormalDist()
        values = [round(length.mean + length.std * standard.inv_cdf(draw)) for draw in draws.tolist()]
        return [min(max(value, length.min), length.max) for value in values]
    return [length.value] * count


def request_seed(seed: int, index: int, *, warmup: bool = False) -> int:
    """The sampling seed of a request, 0 <= seed < 2**63.

    The first 8 bytes, big-endian, of the SHA-256 of "request:<seed>:<index>" ("warmup:..." for a warm-up request),
    without the lowest bit: a hash of the place in the workload, so no request shares or shifts another's draws.
    """
    text = f"{'warmup' if warmup else 'request'}:{seed}:{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
