"""Counter-based random numbers: every draw is a pure function of (seed, output position, purpose).

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A stateless generator
is what makes a request's tokens independent of its batch, of chunking and of preemption.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

NUM_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
# What each round adds to the key.
_WEYL = np.arange(NUM_ROUNDS, dtype=np.uint32)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint32)
# Where a uint64 seen as two uint32 has its halves.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


class Purpose(IntEnum):
    """What a draw is for: one position may need several that must not depend on each other."""

    TOKEN = 0  # the token itself, of plain decoding and after a draft that was accepted whole
    DRAFT = 1  # a draft's token
    ACCEPT = 2  # whether a draft's token is taken
    RECOVERED = 3  # the token in place of one that is not


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox.

    Args:
        counter: uint32 [4, n].
        key: uint32 [2, n].

    Returns: uint32 [4, n].
    """
    keys = key + _WEYL
    multiplied, added = counter[0::2], counter[1::2]
    products = np.empty(multiplied.shape, dtype=np.uint64)
    halves = products.view(np.uint32).reshape(*products.shape, 2)
    # A product's halves are taken where they lie: for a batch, the time goes with the number of numpy's calls.
    low, high = halves[..., _LOW], halves[::-1, :, _HIGH]
    for round_keys in keys:
        np.multiply(multiplied, _MULTIPLIERS, out=products)
        multiplied = high ^ added
        multiplied ^= round_keys
        added = low[::-1].copy()
    return np.stack((multiplied, added), axis=1).reshape(counter.shape)


def uniform(seeds: Sequence[int], positions: Sequence[int], purpose: Purpose) -> np.ndarray:
    """One uniform in [0, 1) with 53 random bits per (seed, position).

    Args:
        seeds: non-negative, below 2**64.
        positions: index of the output token each draw is for.

    Returns: float64 [n].
    """
    key = _words(seeds)
    counter = np.zeros((4, len(seeds)), dtype=np.uint32)
    counter[:2] = _words(positions)
    counter[2] = purpose
    words = philox4x32(counter, key).astype(np.uint64)
    return ((words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))) * 2.0**-53


def _words(numbers: Sequence[int]) -> np.ndarray:
    """uint32 [2, n]: the low words of 64-bit numbers, and the high ones."""
    words = np.array(numbers, dtype=np.uint64).view(np.uint32).reshape(-1, 2)
    return words.T[[_LOW, _HIGH]]
