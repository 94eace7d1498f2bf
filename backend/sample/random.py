"""Counter-based random numbers: every draw is a pure function of (seed, output position, purpose).

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A stateless generator
is what makes a request's tokens independent of its batch, of chunking and of preemption.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Purpose(IntEnum):
    """What a draw is for: one position may need several that must not depend on each other."""

    TOKEN = 0


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox.

    Args:
        counter: uint64 [n, 4], each a 32-bit word.
        key: uint64 [n, 2], each a 32-bit word.

    Returns: uint64 [n, 4], each a 32-bit word.
    """
    x0, x1, x2, x3 = counter.T
    k0, k1 = key.T
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ x3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((x0, x1, x2, x3), axis=1)


def uniform(seeds: list[int], positions: list[int], purpose: Purpose) -> np.ndarray:
    """One uniform in [0, 1) with 53 random bits per (seed, position).

    Args:
        seeds: non-negative, below 2**64.
        positions: index of the output token each draw is for.

    Returns: float64 [n].
    """
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zeros = np.zeros_like(seed)
    counter = np.stack((position & _LOW, position >> _SHIFT, zeros + np.uint64(purpose), zeros), axis=1)
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _SHIFT), axis=1))
    high, low = words[:, 0], words[:, 1]
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
