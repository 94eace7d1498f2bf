"""Where a sum over logits, from the largest down, reaches a target: what top-k and top-p search for, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

# Passes of a search whose pivots divide the range of logits; later ones divide the floats in it, which must come to an
# end, however the logits lie.
NUM_PASSES_BY_VALUE = tl.constexpr(5)
# What is summed up, for `BY_COUNT`.
NUMBERS, WEIGHTS = tl.constexpr(True), tl.constexpr(False)


@triton.jit
def _float_of(key):
    """The inverse of `_key_of`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(x):
    """An int32 that is ordered as the floats are, neighbours one apart."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _pivot(low, high, num_passes, quarters):
    """A float in (low, high] at about so many quarters of the way; `high` if there is none between the two."""
    by_value = low * (1.0 - quarters / 4) + high * (quarters / 4)
    low_key = _key_of(low).to(tl.int64)
    distance = _key_of(high).to(tl.int64) - low_key
    by_key = _float_of((low_key + (distance * quarters + 3) // 4).to(tl.int32))
    above_low = _float_of((low_key + 1).to(tl.int32))
    by_value = tl.minimum(tl.maximum(by_value, above_low), high)
    return tl.where(num_passes < NUM_PASSES_BY_VALUE, by_value, by_key)


@triton.jit
def _sum_from(pivot, logits, amounts):
    """Of each four neighbours: sums of four are exact enough in fp32, and fp64 is scarce on most cards."""
    return tl.sum(tl.where(logits >= pivot, amounts, 0.0), axis=1).to(tl.float64)


@triton.jit
def find_threshold(
    logits_ptr,
    vocab_size,
    largest,
    exponent_scale,
    unit,
    floor,
    amount_at_floor,
    target,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logit at which the amounts, summed by falling logit, reach the target; only logits above `floor` are looked at.

    The amount of a logit is 1 for `BY_COUNT`, and the target a number; else its weight, and the target a share of the
    sum, to which what is kept at the floor adds. Each pass sums up from four pivots, the lowest of which has the target
    reached, and goes on between the two where it is.

    Returns:
        The logit (`floor` if the target is not reached above it), the amount above it, the target as an amount, and how
        many logits equal it (0 for the floor).
    """
    row = tl.arange(0, BLOCK // 4)[:, None]
    lane = row * 4 + tl.arange(0, 4)[None, :]
    # -0.0 has a neighbour that equals it.
    low = _float_of(_key_of(tl.where(floor == 0.0, 0.0, floor)) + 1)
    high = float("inf")
    # Where a threshold is likely: some units below the largest.
    second = tl.maximum(largest - 16.0 * unit, low)
    third = tl.maximum(largest - 4.0 * unit, low)
    fourth = tl.maximum(largest - unit, low)
    threshold = floor
    above_high = tl.full([], 0.0, dtype=tl.float64)
    num_equal = 0.0
    num_passes = 0
    is_searching = 1
    while is_searching == 1:
        from_low = tl.zeros([BLOCK // 4], dtype=tl.float64)
        from_second = tl.zeros([BLOCK // 4], dtype=tl.float64)
        from_third = tl.zeros([BLOCK // 4], dtype=tl.float64)
        from_fourth = tl.zeros([BLOCK // 4], dtype=tl.float64)
        lowest = tl.full([BLOCK // 4], float("inf"), dtype=tl.float32)
        highest = tl.full([BLOCK // 4], float("-inf"), dtype=tl.float32)
        num_inside = tl.zeros([BLOCK // 4], dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            column = start + lane
            logits = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf"))
            if BY_COUNT:
                amounts = tl.full([BLOCK // 4, 4], 1.0, dtype=tl.float32)
            else:
                amounts = tl.exp2((logits - largest) * exponent_scale)
            from_low += _sum_from(low, logits, amounts)
            from_second += _sum_from(second, logits, amounts)
            from_third += _sum_from(third, logits, amounts)
            from_fourth += _sum_from(fourth, logits, amounts)
            is_inside = (logits >= low) & (logits < high)
            lowest = tl.minimum(lowest, tl.min(tl.where(is_inside, logits, float("inf")), axis=1))
            highest = tl.maximum(highest, tl.max(tl.where(is_inside, logits, float("-inf")), axis=1))
            num_inside += tl.sum(tl.where(is_inside, 1.0, 0.0), axis=1)
        above_floor = tl.sum(from_low, axis=0)
        above_second = tl.sum(from_second, axis=0)
        above_third = tl.sum(from_third, axis=0)
        above_fourth = tl.sum(from_fourth, axis=0)
        inside_low = tl.min(lowest, axis=0)
        inside_high = tl.max(highest, axis=0)
        if num_passes == 0:
            if not BY_COUNT:
                target = target * (above_floor + amount_at_floor)
            if above_floor < target:
                is_searching = 0
                above_high = above_floor
        if is_searching == 1:
            if inside_low == inside_high:
                is_searching = 0
                threshold = inside_low
                num_equal = tl.sum(num_inside, axis=0)
            else:
                low = tl.where(above_second >= target, second, low)
                low = tl.where(above_third >= target, third, low)
                low = tl.where(above_fourth >= target, fourth, low)
                low = tl.maximum(low, inside_low)
                if above_second < target:
                    high = second
                    above_high = above_second
                elif above_third < target:
                    high = third
                    above_high = above_third
                elif above_fourth < target:
                    high = fourth
                    above_high = above_fourth
                top = tl.minimum(high, inside_high)
                second = _pivot(low, top, num_passes, 1)
                third = _pivot(low, top, num_passes, 2)
                fourth = _pivot(low, top, num_passes, 3)
                num_passes += 1
    return threshold, above_high, target, num_equal
