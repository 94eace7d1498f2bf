"""Vectors (keys, or values) of the cache in 8 or 4 bits: how kernels write and read them.

Not an op: device functions, whose arithmetic is that of `kernels.reference.kv_quantization`. 8-bit floats are made and taken
apart by integer operations, which every card has, with the results of the hardware's own conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT16_MAX = tl.constexpr(65504.0)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def rotate_halves(left, right, ROWS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr):
    """Rows of 2 * HALF elements, fp32, times the orthonormal Hadamard matrix, as two tiles [ROWS, HALF]; HALF = 2^LEVELS."""
    scale: tl.constexpr = (2 * HALF) ** -0.5
    total, difference = left + right, left - right
    return (
        _butterflies(total, ROWS, HALF, LEVELS) * scale,
        _butterflies(difference, ROWS, HALF, LEVELS) * scale,
    )


@triton.jit
def _butterflies(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEVELS: tl.constexpr):
    for level in tl.static_range(LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        pairs = tl.permute(tl.reshape(x, [ROWS, 1 << level, 2, LENGTH >> (level + 1)]), [0, 1, 3, 2])
        first, second = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2]), [ROWS, LENGTH])
    return x


@triton.jit
def quantize_halves(left, right, FORMAT: tl.constexpr):
    """Rows of elements as two halves, fp32 [rows, half], to codes, and fp16 scales [rows].

    Elements that pad a row are 0, and int4 has none. int4 gives both halves in the first tile of codes.
    """
    finite = (tl.abs(left) <= FLOAT32_MAX) & (tl.abs(right) <= FLOAT32_MAX)
    row_finite = tl.min(finite.to(tl.int32), axis=1).to(tl.int1)
    left = tl.where(row_finite[:, None], left, 0.0)
    right = tl.where(row_finite[:, None], right, 0.0)
    if FORMAT == "int4":
        largest_code = 15.0
        minimum = _to_float16(tl.minimum(tl.min(left, axis=1), tl.min(right, axis=1)), -FLOAT16_MAX)
        left -= minimum.to(tl.float32)[:, None]
        right -= minimum.to(tl.float32)[:, None]
        largest = tl.maximum(tl.max(left, axis=1), tl.max(right, axis=1))
    else:
        largest_code = 127.0 if FORMAT == "int8" else 448.0
        largest = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
        minimum = tl.zeros_like(largest).to(tl.float16)  # none
    scale = _to_float16(tl.div_rn(largest, largest_code), 0.0)
    # A scale of 0 leaves what rounds to 0 anyway, or is a constant that needs no code.
    divisor = tl.where(scale > 0.0, scale.to(tl.float32), 1.0)[:, None]
    left, right = tl.div_rn(left, divisor), tl.div_rn(right, divisor)
    scale = tl.where(row_finite, scale, float("nan"))
    if FORMAT == "int4":
        minimum = tl.where(row_finite, minimum, float("nan"))
        low, high = _rounded(left, 0.0, largest_code), _rounded(right, 0.0, largest_code)
        first = (low.to(tl.int32) | (high.to(tl.int32) << 4)).to(tl.uint8)
        second = first
    elif FORMAT == "int8":
        first = _rounded(left, -largest_code, largest_code).to(tl.int8)
        second = _rounded(right, -largest_code, largest_code).to(tl.int8)
    else:
        first, second = to_e4m3(left), to_e4m3(right)
    return first, second, scale, minimum


@triton.jit
def store_halves(
    vector_ptrs,
    scales_ptrs,
    first,
    second,
    scale,
    minimum,
    row_mask,
    column,
    HALF: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """What `quantize_halves` gave, to where each row's vector and its scales begin."""
    mask = row_mask[:, None] & (column < HALF)[None, :]
    tl.store(vector_ptrs[:, None] + column[None, :], first, mask=mask)
    tl.store(scales_ptrs, scale, mask=row_mask)
    if FORMAT == "int4":
        tl.store(scales_ptrs + 1, minimum, mask=row_mask)
    else:
        tl.store(vector_ptrs[:, None] + HALF + column[None, :], second, mask=mask)


@triton.jit
def load_keys_and_values(
    key_head_ptr,
    value_head_ptr,
    key_scales_ptr,
    value_scales_ptr,
    key_offset,
    value_offset,
    vector,
    vector_mask,
    column,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    dtype: tl.constexpr,
):
    """A tile of keys [columns, vectors] and one of values [vectors, columns], 0 where `vector_mask` is not set.

    `key_offset` and `value_offset` are where the vectors begin, in elements from `key_head_ptr` and `value_head_ptr`,
    `vector` is each one's place among those of all blocks, which is where its scales are.
    """
    key = _load_vectors(
        key_head_ptr,
        key_scales_ptr,
        key_offset[None, :],
        vector[None, :],
        vector_mask[None, :],
        column[:, None],
        HEAD_DIM,
        FORMAT,
    )
    value = _load_vectors(
        value_head_ptr,
        value_scales_ptr,
        value_offset[:, None],
        vector[:, None],
        vector_mask[:, None],
        column[None, :],
        HEAD_DIM,
        FORMAT,
    )
    return key.to(dtype), value.to(dtype)


@triton.jit
def _load_vectors(
    head_ptr, scales_ptr, offset, vector, vector_mask, column, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr
):
    """fp32 of vectors along one axis of a tile, with their elements (`column`) along the other, in either order."""
    mask = vector_mask & (column < HEAD_DIM)
    if FORMAT == "int4":
        HALF: tl.constexpr = HEAD_DIM // 2
        scale = tl.load(scales_ptr + 2 * vector, mask=vector_mask, other=0.0).to(tl.float32)
        minimum = tl.load(scales_ptr + 2 * vector + 1, mask=vector_mask, other=0.0).to(tl.float32)
        packed = tl.load(head_ptr + offset + column % HALF, mask=mask, other=0).to(tl.int32)
        tile = ((packed >> (column // HALF * 4)) & 15).to(tl.float32) * scale + minimum
    else:
        scale = tl.load(scales_ptr + vector, mask=vector_mask, other=0.0).to(tl.float32)
        code = tl.load(head_ptr + offset + column, mask=mask, other=0)
        if FORMAT == "int8":
            tile = code.to(tl.float32) * scale
        else:
            # The bits of an e4m3 at their places in an fp16, whose exponents begin 8 lower.
            bits = code.to(tl.uint16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            tile = half.to(tl.float32) * (scale * 256.0)
    return tile


@triton.jit
def _to_float16(x, lowest):
    return tl.minimum(tl.maximum(x, lowest), FLOAT16_MAX).to(tl.float16)


@triton.jit
def _rounded(x, lowest, highest):
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), lowest), highest)


@triton.jit
def to_e4m3(x):
    """fp32 to the nearest 8-bit float (ties to even), as uint8; beyond 448 to 448."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 bits of the mantissa go, and the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 all are multiples of 2^-9, which is what the last bit of 2^14 stands for.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)
