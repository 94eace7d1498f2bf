"""Integer codes of 4 or 8 bits in 32-bit words, taken apart and scaled in registers.

Not an op: device functions. Weights come in chunks of 32 inputs, which lie within one group: a tile of them is words
[rows, chunks, words of a chunk], and its scales are [rows, chunks].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_grid(
    scales_ptr,
    origins_ptr,
    row,
    group,
    mask,
    stride_scales_row,
    stride_origins_row,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
):
    """`w = step * unit + start` of the chunks: two times float32 [rows, chunks]; see `units` for unit.

    Args:
        row: int [rows]; group: int [chunks]; mask: [1, chunks].
        ORIGIN: "none", "integer" (zero points) or "float" (minimums), one for each scale.
    """
    wide_row = row[:, None].to(tl.int64)
    scale = tl.load(scales_ptr + wide_row * stride_scales_row + group[None, :], mask=mask, other=0.0).to(tl.float32)
    origin_offset = wide_row * stride_origins_row + group[None, :]
    SPAN: tl.constexpr = 2**BITS  # a code is SPAN * (unit - 1)
    step = scale * SPAN
    if ORIGIN == "float":
        start = tl.load(origins_ptr + origin_offset, mask=mask, other=0.0).to(tl.float32)
    elif ORIGIN == "integer":
        start = -scale * tl.load(origins_ptr + origin_offset, mask=mask, other=0).to(tl.float32)
    else:
        start = -scale * (SPAN // 2)
    return step, start - step


@triton.jit
def units(words, PLACE: tl.constexpr, BITS: tl.constexpr):
    """`1 + code / 2^BITS` of the PLACE-th code of each word, float32: the code's bits are the mantissa's first.

    A shift and a three-input logic instruction, where a conversion from integer runs at a quarter of their rate.
    """
    TOP: tl.constexpr = 23 - BITS
    SHIFT: tl.constexpr = PLACE * BITS - TOP
    moved = words >> SHIFT if SHIFT > 0 else words << -SHIFT
    return ((moved & ((2**BITS - 1) << TOP)) | 0x3F800000).to(tl.float32, bitcast=True)
