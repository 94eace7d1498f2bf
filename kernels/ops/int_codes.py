"""Integer codes of 4 or 8 bits in 32-bit words, taken apart and scaled in registers.

Not an op: device functions. Weights come in chunks of 128 inputs, see `kernels.reference.int_words.to_chunks`: a word of a
chunk holds four pairs of neighbouring columns, and place p of all its words the columns from 32 p on.

A pair becomes two numbers of 16 bits with a shift and a three-input logic instruction: the codes are or-ed into the mantissa
of 128 (bfloat16) or 1024 (float16), of which they are the last bits (the trick of Kim et al. 2022, "Who Says Elephants Can't
Run"). What stands above the code is to be taken off again, see `code_bias`.

Whole codes of 8 bits, see `signed_part`, have nothing above them. Their bits are those of subnormal numbers, and in bfloat16,
from 128 on, of numbers of the lowest exponent, which lie at the same distance from each other. A multiplication by the type's
largest power of two and an addition, together one instruction for a pair, make signed codes of them, exact but for a scale.
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
def code_magic(DTYPE: tl.constexpr):
    """What `magic` is, see MAGIC of `kernels.ops.code_launch`."""
    return 0 if DTYPE.is_fp32() else 0x64006400 if DTYPE.is_fp16() else 0x43004300


@triton.jit
def byte_pairs(low, high, magic, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Of each word and that of its codes' high halves the pair at PLACE, int32: two codes of 8 bits, nothing above them."""
    # Were the masks known to the compiler, it would take both steps apart: the choice between two words into masking each of
    # them, and the pair into halves. Sums with `magic` it adds up once, and then has each step in one instruction.
    nothing = magic - code_magic(DTYPE)
    if PLACE % 2 == 0:
        high = high << 4
    else:
        low = low >> 4
    # Every other four bits are `low`'s, those above them `high`'s: the codes of this place and of one that is two away.
    both = ((low ^ high) & (nothing + 0x0F0F0F0F)) ^ high
    return (both >> (8 * (PLACE // 2))) & (nothing + 0x00FF00FF)


@triton.jit
def signed_scaling(DTYPE: tl.constexpr):
    """Factor and addend that make signed codes of `byte_pairs`' numbers, and what products with those are to be multiplied by."""
    if DTYPE.is_fp32():
        scaling = (1.0, -128.0, 1.0)
    elif DTYPE.is_fp16():
        scaling = (2.0**15, -0.25, 512.0)
    else:
        scaling = (2.0**127, -2.0, 64.0)
    return scaling


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
def _signed_halves(pairs, DTYPE: tl.constexpr):
    """[..., 2]: both codes of `byte_pairs` less 128, but for the scale of `signed_scaling`."""
    if DTYPE.is_fp32():
        numbers = tl.join((pairs & 0xFF).to(tl.float32), (pairs >> 16).to(tl.float32))
    else:
        numbers = pair_halves(pairs, DTYPE)
    factor, addend, _ = signed_scaling(DTYPE)
    # Nothing is rounded.
    return tl.fma(numbers, tl.full(numbers.shape, factor, DTYPE), tl.full(numbers.shape, addend, DTYPE))


@triton.jit
def _pairs(low, high, magic, PLACE: tl.constexpr, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    return byte_pairs(low, high, magic, PLACE, DTYPE) if WHOLE else place_pairs(low, magic, PLACE)


@triton.jit
def _part_pairs(low, high, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """The pairs of a part of each chunk, by place: a dimension for each of its bits."""
    if PARTS == 4:
        pairs = _pairs(low, high, magic, PART, DTYPE, WHOLE)
    elif PARTS == 2:
        first = _pairs(low, high, magic, 2 * PART, DTYPE, WHOLE)
        pairs = tl.join(first, _pairs(low, high, magic, 2 * PART + 1, DTYPE, WHOLE))
    else:
        even = tl.join(_pairs(low, high, magic, 0, DTYPE, WHOLE), _pairs(low, high, magic, 2, DTYPE, WHOLE))
        odd = tl.join(_pairs(low, high, magic, 1, DTYPE, WHOLE), _pairs(low, high, magic, 3, DTYPE, WHOLE))
        pairs = tl.join(even, odd)
    return pairs


@triton.jit
def chunk_part(words, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of a part of each chunk, by place (a dimension for each of its bits) and by half of a pair.

    Words [...] -> [..., 2, 2, 2] of all of it, [..., 2, 2] of one half of two, [..., 2] of one place of four.
    """
    return pair_halves(_part_pairs(words, words, magic, PART, PARTS, DTYPE, False), DTYPE)


@triton.jit
def signed_part(low, high, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """What `chunk_part` gives, of codes of 8 bits less 128, exact but for the scale of `signed_scaling`.

    Args:
        low, high: words of the codes' low halves, and of their high ones.
    """
    return _signed_halves(_part_pairs(low, high, magic, PART, PARTS, DTYPE, True), DTYPE)
