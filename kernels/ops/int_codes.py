"""Integer codes of 4 or 8 bits in 32-bit words, taken apart and scaled in registers.

Not an op: device functions. Weights come in chunks of 128 inputs, see `kernels.reference.int_words.to_chunks`: a word of a
chunk holds four pairs of neighbouring columns, and place p of all its words the columns from 32 p on.

A pair becomes two numbers of 16 bits with a shift and a three-input logic instruction: the codes are or-ed into the mantissa
of 128 (bfloat16) or 1024 (float16), of which they are the last bits (the trick of Kim et al. 2022, "Who Says Elephants Can't
Run"). What stands above the code is to be taken off again, see `code_bias`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_pairs(words, magic, PLACE: tl.constexpr):
    """Of each word the pair at PLACE, int32: two codes, above each of which `magic` stands."""
    return ((words >> (4 * PLACE)) & 0x000F000F) | magic


@triton.jit
def code_bias(DTYPE: tl.constexpr, BITS: tl.constexpr):
    """By how much codes are too large as numbers, with 8 bits as `low + 16 * high`; in float32 they are not."""
    bias = 0.0 if DTYPE.is_fp32() else 1024.0 if DTYPE.is_fp16() else 128.0
    return bias * (17.0 if BITS == 8 else 1.0)


@triton.jit
def ones_magic(DTYPE: tl.constexpr):
    """The magic under which pairs of codes of 0 are ones."""
    return 0x00010001 if DTYPE.is_fp32() else 0x3C003C00 if DTYPE.is_fp16() else 0x3F803F80


@triton.jit
def pair_halves(pairs, DTYPE: tl.constexpr):
    """[..., 2]: both codes of the pairs as numbers, with what stands above them."""
    if DTYPE.is_fp32():
        left = (pairs & 0xF).to(tl.float32)
        right = ((pairs >> 16) & 0xF).to(tl.float32)
    else:
        left = pairs.to(tl.int16).to(DTYPE, bitcast=True)
        right = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(left, right)


@triton.jit
def chunk_part(words, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of a part of each chunk, by place (a dimension for each of its bits) and by half of a pair.

    Words [...] -> [..., 2, 2, 2] of all of it, [..., 2, 2] of one half of two, [..., 2] of one place of four.
    """
    if PARTS == 4:
        pairs = place_pairs(words, magic, PART)
    elif PARTS == 2:
        pairs = tl.join(place_pairs(words, magic, 2 * PART), place_pairs(words, magic, 2 * PART + 1))
    else:
        even = tl.join(place_pairs(words, magic, 0), place_pairs(words, magic, 2))
        odd = tl.join(place_pairs(words, magic, 1), place_pairs(words, magic, 3))
        pairs = tl.join(even, odd)
    return pair_halves(pairs, DTYPE)
