"""NormalFloat4's levels from its codes, in registers. Not an op: device functions, and the numbers they need.

A `prmt` takes four codes of 4 bits and gives a byte for each: of the code's lower three bits, one of a table of eight; where
the fourth is set, that byte's top bit eight times, instead. Two tables, the other looked up with the fourth bits flipped, so
give `first[c] ^ top(second[c])` and `second[c] ^ top(first[c])`. Where numbers c and c + 8 have the same top bit, that is made 0
in the second table, whose other bits are flipped where it was 1: the exclusive or of both is then the number, of either half.
So it is with both bytes of all levels, in the order of `STORED_CODES`, and of float16 once they are multiplied by a number.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.nf4_linear import NF4_LEVELS
from kernels.reference.nf4_words import STORED_CODES

# What levels are multiplied by, and sums are divided by.
LEVEL_SCALE = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float16: 1 + 74 / 1024}


@lru_cache
def level_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`LEVEL_SCALE` times the level of each stored code, dtype [16]; 0 as -0, which is among the negative ones."""
    levels = [-0.0 if level == 0 else level for level in NF4_LEVELS]
    ordered = [levels[STORED_CODES.index(code)] for code in range(16)]
    return (torch.tensor(ordered) * LEVEL_SCALE[dtype]).to(dtype).to(device)


def byte_tables(dtype: torch.dtype) -> list[tuple[int, int]]:
    """The tables of a 16-bit dtype, each as two words: of lower bytes, first and second, and of upper bytes likewise.

    Raises ValueError where numbers c and c + 8 differ in a byte's top bit.
    """
    numbers = [number & 0xFFFF for number in level_table(dtype, torch.device("cpu")).view(torch.int16).tolist()]
    tables = []
    for shift in (0, 8):
        values = [number >> shift & 0xFF for number in numbers]
        if any((one ^ other) & 0x80 for one, other in zip(values[:8], values[8:], strict=True)):
            raise ValueError(f"{dtype} has levels of which no table of bytes can be made")
        seconds = [other ^ (0xFF if one & 0x80 else 0) for one, other in zip(values[:8], values[8:], strict=True)]
        tables += [_two_words(values[:8]), _two_words(seconds)]
    return tables


def _two_words(table: list[int]) -> tuple[int, int]:
    return int.from_bytes(table[:4], "little"), int.from_bytes(table[4:], "little")


@lru_cache
def table_words(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`byte_tables` for a kernel, int32 [8, 32], each lane's own; of float32, which has none, zeros.

    One for all lanes, or constants, the compiler would keep in uniform registers, which `prmt` does not take.
    """
    words = [0] * 8 if dtype == torch.float32 else [word for table in byte_tables(dtype) for word in table]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32)[:, None].repeat(1, 32).to(device)


@triton.jit
def _two_pairs(words, tables, SHIFT: tl.constexpr):
    """Two pairs of numbers, each an int32, from the four codes above SHIFT bits of each word."""
    codes = words >> SHIFT
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 flipped, low, high, other;
        xor.b32 flipped, $2, 0x8888;
        prmt.b32 low, $3, $4, $2;
        prmt.b32 other, $5, $6, flipped;
        xor.b32 low, low, other;
        prmt.b32 high, $7, $8, $2;
        prmt.b32 other, $9, $10, flipped;
        xor.b32 high, high, other;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [codes, tables[0], tables[1], tables[2], tables[3], tables[4], tables[5], tables[6], tables[7]],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_tables(table_ptrs):
    """`table_words`, from where each lane has its first."""
    return (
        tl.load(table_ptrs),
        tl.load(table_ptrs + 32),
        tl.load(table_ptrs + 64),
        tl.load(table_ptrs + 96),
        tl.load(table_ptrs + 128),
        tl.load(table_ptrs + 160),
        tl.load(table_ptrs + 192),
        tl.load(table_ptrs + 224),
    )


@triton.jit
def _halves(pairs, DTYPE: tl.constexpr):
    left = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    right = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(left, right)


@triton.jit
def _looked_up(pairs, levels_ptr):
    left = tl.load(levels_ptr + (pairs & 15))
    right = tl.load(levels_ptr + ((pairs >> 4) & 15))
    return tl.join(left, right)


@triton.jit
def level_part(words, levels_ptr, tables, PART: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr):
    """The levels of a part of each chunk, by place (a dimension for each of its bits) and by half of a pair.

    Words [...] -> [..., 2, 2, 2] of all of it, [..., 2, 2] of one half of two, [..., 2] of one place of four.

    Args:
        levels_ptr: `level_table`, of which the dtype is that of the levels.
        tables: of `load_tables`, for that dtype.
        ASM: whether 16-bit levels may be made by PTX.
    """
    DTYPE: tl.constexpr = levels_ptr.dtype.element_ty
    if ASM and not DTYPE.is_fp32():
        if PARTS == 1:
            place_0, place_1 = _two_pairs(words, tables, 0)
            place_2, place_3 = _two_pairs(words, tables, 16)
            pairs = tl.join(tl.join(place_0, place_2), tl.join(place_1, place_3))
        elif PARTS == 2:
            place_0, place_1 = _two_pairs(words, tables, 16 * PART)
            pairs = tl.join(place_0, place_1)
        else:
            place_0, place_1 = _two_pairs(words, tables, 16 * (PART // 2))
            pairs = place_0 if PART % 2 == 0 else place_1
        levels = _halves(pairs, DTYPE)
    else:
        if PARTS == 1:
            pairs = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
        elif PARTS == 2:
            pairs = tl.join(words >> (16 * PART), words >> (16 * PART + 8))
        else:
            pairs = words >> (8 * PART)
        levels = _looked_up(pairs, levels_ptr)
    return levels
