"""A uniform draw for each row's next output token, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF


def next_draws(seeds: Tensor, positions: Tensor) -> Tensor:
    """What each row draws its token by, a function of seed and output position alone; its position grows by one.

    Args:
        seeds: int64 [num_rows], the bits of an unsigned one
        positions: int64 [num_rows], of the output tokens; mutated
    Returns:
        float64 [num_rows] in [0, 1), see `uniform`.
    """
    draws = uniform(seeds, positions)
    positions += 1
    return draws


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 [n] in [0, 1), with 53 random bits: the first two words of Philox4x32-10 for (position, 0, 0) under each seed.

    The generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Args:
        seeds: int64 [n], the bits of unsigned ones
        positions: int64 [n]
    """
    words = [positions & _WORD, positions >> 32 & _WORD, torch.zeros_like(positions), torch.zeros_like(positions)]
    keys = [seeds & _WORD, seeds >> 32 & _WORD]
    for _ in range(_NUM_ROUNDS):
        (first_high, first_low), (second_high, second_low) = (
            _product(word, factor) for word, factor in zip(words[::2], _MULTIPLIERS, strict=True)
        )
        words = [second_high ^ words[1] ^ keys[0], second_low, first_high ^ words[3] ^ keys[1], first_low]
        keys = [(key + step) & _WORD for key, step in zip(keys, _WEYL, strict=True)]
    return (words[0] << 21 | words[1] >> 11).double() * 2.0**-53


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product of two words, without a number of more than 63 bits."""
    upper, lower = word * (factor >> 16), word * (factor & 0xFFFF)  # of 48 bits each
    total = (lower >> 16) + upper
    return total >> 16, (total & 0xFFFF) << 16 | lower & 0xFFFF
