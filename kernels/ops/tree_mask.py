"""What rows that are nodes of a tree of drafts see of it. Not an op: device functions."""

from __future__ import annotations

import triton
import triton.language as tl

NO_TREE = tl.constexpr(-1)


@triton.jit
def within_window(tree_bits, place, tree_start, WINDOW: tl.constexpr):
    """The positions of rows, and their bits without those of ancestors that the window has left behind.

    Args:
        tree_bits: int64 [BLOCK_M], the row's own bit and those of its ancestors; NO_TREE: the row stands at its `place`.
    """
    num_seen = tl.where(tree_bits == NO_TREE, 0, _count_bits(tree_bits))
    position = tl.where(tree_bits == NO_TREE, place, tree_start + num_seen - 1)
    num_behind = num_seen - WINDOW
    for index in range(tl.max(num_behind, axis=0)):
        tree_bits = tl.where(index < num_behind, tree_bits & (tree_bits - 1), tree_bits)  # without the lowest one
    return position, tree_bits


@triton.jit
def _count_bits(bits):
    """int32, of int64: sums of neighbours, twice as wide each time (Warren, Hacker's Delight, 5-1)."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)
