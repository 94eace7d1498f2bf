"""Where an output goes round in a loop: a small model's greedy output often does, and flatters whatever drafts it."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64  # tokens
MIN_REPEATED = 16  # tokens, and the period twice: what stands there three times is a loop


def in_loop(token_ids: Sequence[int]) -> list[bool]:
    """Of each token, whether it lies in a loop: in a run of tokens that each equal the one a period of up to 64 before.

    Such a run counts from 16 tokens and from two periods on; the loop's first turn, which repeats nothing, is no part of it.
    """
    marked = [False] * len(token_ids)
    for period in range(1, min(MAX_PERIOD, len(token_ids) - 1) + 1):
        start = period
        for index in range(period, len(token_ids) + 1):
            if index < len(token_ids) and token_ids[index] == token_ids[index - period]:
                continue
            if index - start >= max(2 * period, MIN_REPEATED):
                marked[start:index] = [True] * (index - start)
            start = index + 1
    return marked


def loop_at_end(token_ids: Sequence[int]) -> int:
    """How many tokens at the end lie in one loop, as `in_loop` has it; 0 where the end is in none."""
    longest = 0
    for period in range(1, min(MAX_PERIOD, len(token_ids) - 1) + 1):
        number = 0
        while number < len(token_ids) - period and token_ids[-1 - number] == token_ids[-1 - number - period]:
            number += 1
        if number >= max(2 * period, MIN_REPEATED):
            longest = max(longest, number)
    return longest
