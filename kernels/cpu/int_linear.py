"""A linear layer over 4 or 8 bit codes with a scale per group of inputs, for the few tokens of a decode step and for many.

Activations and sums are float32. Of a group, codes times activations are summed first; its scale and origin follow once.
"""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.llvm import (
    FLOAT,
    HALF,
    INT8,
    INT32,
    INT64,
    POINTER,
    CompiledModule,
    CountedLoop,
    FunctionBuilder,
    Value,
    constant,
    has_avx512,
    number,
    vector,
)
from kernels.cpu.row_tiles import TILE
from kernels.cpu.threads import over_tiles
from kernels.reference.int_words import codes_per_word

# Tiles and tokens of a block, whose sums grow side by side: a multiply-add takes four cycles. Each sum is one chain in any of
# them, so that a token's output depends neither on how many there are nor on threads.
_ONE_TOKEN, _ONE_TILE = (4, 1), (1, 4)
_ONE_TILE_AVX512 = (1, 8)  # its sums would fill the 16 registers of AVX2
_DTYPES = {torch.float32: (FLOAT, 4), torch.float16: (HALF, 2)}


def int_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    minimums: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_features: int,
) -> Tensor:
    """`y = x W^T + b`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    `w = (q - z) * s`, or `w = q * s + m`, is not rounded to x's dtype.

    Args:
        words: int32 [cdiv(out_features, 16), cdiv(in_features, 32 / bits), 16], see `to_row_tiles`: as
            `kernels.reference.int_words.pack_words` gives them, made signed by `to_signed`.
        scales: float16 or float32 [cdiv(out_features, 16), num_groups, 16]; a group is a whole number of words, unless it
            is the only one.
        zero_points: uint8 likewise, or None: with no minimums either, 2^(bits-1).
        minimums: as scales, or None.
        bias: float [out_features].
    Raises:
        ValueError: x does not fit the weight, which has to be one that `prepare_int_linear` let pass.
    """
    num_tokens, in_features = x.shape
    num_tiles, num_words, _ = words.shape
    num_groups, per_word = scales.shape[1], codes_per_word(bits)
    if not 0 <= num_words * per_word - in_features < per_word or x.device.type != "cpu":
        raise ValueError(f"x {list(x.shape)} on {x.device} for a weight of {num_words * per_word} inputs on a CPU")
    if num_tokens == 0:
        return x.new_empty(0, out_features)
    inputs = x.float()
    if num_words * per_word > in_features:
        inputs = F.pad(inputs, (0, num_words * per_word - in_features))
    inputs = inputs.contiguous()
    origins = zero_points if zero_points is not None else minimums
    # Without origins, neither they nor the sums are read.
    sums = inputs if origins is None else inputs.view(num_tokens, num_groups, -1).sum(2)
    y = torch.empty(num_tokens, num_tiles * TILE)
    kernel = _compile(bits, scales.dtype, _origin(zero_points, minimums))["int_linear"]
    tensors = (inputs, sums, words, scales, scales if origins is None else origins, y)
    pointers = [tensor.data_ptr() for tensor in tensors]

    def run(first: int, end: int) -> None:
        kernel(*pointers, num_tokens, first, end, num_words, num_words // num_groups, y.shape[1])

    over_tiles(run, num_tiles, num_tokens * num_words * per_word * y.shape[1])
    y = y[:, :out_features]
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


def to_signed(words: Tensor, bits: int) -> Tensor:
    """Words of codes from 0 on as words of the same codes less 2^(bits-1), in two's complement, and the other way round."""
    return words ^ {4: -0x77777778, 8: -0x7F7F7F80}[bits]


def prepare_int_linear(
    words: Tensor, scales: Tensor, bits: int, zero_points: Tensor | None, minimums: Tensor | None
) -> None:
    """Check a weight's tensors and compile what `int_linear` will run for them. Raises `ValueError`."""
    tensors = {"words": words, "scales": scales, "zero_points": zero_points, "minimums": minimums}
    dtypes = {"words": torch.int32, "zero_points": torch.uint8, "minimums": scales.dtype}
    if scales.dtype not in _DTYPES:
        raise ValueError(f"scales are {scales.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    if bits not in (4, 8) or (zero_points is not None and minimums is not None) or words.shape[1] % scales.shape[1]:
        raise ValueError(
            f"{bits} bits, {words.shape[1]} words in {scales.shape[1]} groups, with {_origin(zero_points, minimums)}"
        )
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        shape = words.shape if name == "words" else (len(words), scales.shape[1], TILE)
        dtype = dtypes.get(name, tensor.dtype)
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} are {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"not contiguous {dtype} {list(shape)} on a CPU"
            )
    _compile(bits, scales.dtype, _origin(zero_points, minimums))


def _origin(zero_points: Tensor | None, minimums: Tensor | None) -> str:
    return "zero_points" if zero_points is not None else "minimums" if minimums is not None else "none"


@cache
def _compile(bits: int, dtype: torch.dtype, origin: str) -> CompiledModule:
    """Args:
    dtype: of scales and minimums.
    origin: "none", "zero_points" or "minimums".
    """
    module = ir.Module("int_linear")
    many_tokens = [_ONE_TILE_AVX512, _ONE_TILE] if has_avx512() else [_ONE_TILE]
    blocks = {
        (tiles, tokens): _Block(module, tiles, tokens, bits, dtype, origin).function
        for tiles, tokens in (*many_tokens, _ONE_TOKEN, (1, 1))
    }
    build = FunctionBuilder(module, "int_linear", [POINTER] * 6 + [INT64] * 6)
    *pointers, num_tokens, first, end, num_words, group_words, stride = build.args

    def over_tokens(tiles: int, tile: Value) -> None:
        start = number(0)
        for block in (*many_tokens, (tiles, 1)):
            loop = CountedLoop(build, start, build.sub(num_tokens, number(block[1] - 1)), step=block[1])
            for index in range(0, tiles, block[0]):
                place = [build.add(tile, number(index)), loop.index]
                build.call(blocks[block], [*pointers, *place, num_words, group_words, stride])
            loop.close()
            start = loop.index

    start = first
    for tiles in (_ONE_TOKEN[0], 1):
        loop = CountedLoop(build, start, build.sub(end, number(tiles - 1)), step=tiles)
        over_tokens(tiles, loop.index)
        loop.close()
        start = loop.index
    build.ret_void()
    return CompiledModule(module)


class _Block:
    """A function that computes some tiles' outputs for some tokens."""

    def __init__(self, module: ir.Module, tiles: int, tokens: int, bits: int, dtype: torch.dtype, origin: str) -> None:
        self._bits, self._origin = bits, origin
        self._element, self._size = _DTYPES[dtype]
        self._tiles, self._tokens = range(tiles), range(tokens)
        self._build = build = FunctionBuilder(module, f"block_{tiles}_{tokens}", [POINTER] * 6 + [INT64] * 5)
        self.function = build.function
        self.function.linkage = "internal"
        x, sums, words, scales, origins, y, tile, token, num_words, group_words, stride = build.args
        num_groups = build.sdiv(num_words, group_words)
        num_columns = build.mul(num_words, number(codes_per_word(bits)))
        all_tiles = [build.add(tile, number(index)) for index in self._tiles]
        all_tokens = [build.add(token, number(index)) for index in self._tokens]
        pairs = [(a, b) for a in self._tiles for b in self._tokens]
        zeros = [constant(FLOAT, 0.0)] * len(pairs)

        groups = CountedLoop(build, number(0), num_groups, zeros)
        start = build.mul(groups.index, group_words)
        inner = CountedLoop(build, start, build.add(start, group_words), zeros)
        products = list(inner.values)
        column = build.mul(inner.index, number(codes_per_word(bits)))
        rows = [build.add(build.mul(index, num_columns), column) for index in all_tokens]
        words_of = [self._vector_at(words, index, num_words, inner.index, INT32, 4) for index in all_tiles]
        for place in range(codes_per_word(bits)):
            codes = [self._codes(word, place) for word in words_of]
            values = [build.load_splat(x, build.add(row, number(place)), FLOAT) for row in rows]
            products = [
                build.fma(codes[a], values[b], product) for (a, b), product in zip(pairs, products, strict=True)
            ]
        inner.close(products)

        totals = list(groups.values)
        for a in self._tiles:
            scale, origin_value = self._scale_and_origin(scales, origins, all_tiles[a], num_groups, groups.index)
            for b in self._tokens:
                index = pairs.index((a, b))
                totals[index] = build.fma(scale, inner.values[index], totals[index])
                if origin_value is not None:
                    at = build.add(build.mul(all_tokens[b], num_groups), groups.index)
                    totals[index] = build.fma(origin_value, build.load_splat(sums, at, FLOAT), totals[index])
        groups.close(totals)

        for (a, b), total in zip(pairs, groups.values, strict=True):
            at = build.add(build.mul(all_tokens[b], stride), build.mul(all_tiles[a], number(TILE)))
            build.store_vector(total, y, at, FLOAT, 4)
        build.ret_void()

    def _vector_at(
        self, pointer: Value, tile: Value, length: Value, index: Value, element: ir.Type, size: int
    ) -> Value:
        at = self._build.mul(self._build.add(self._build.mul(tile, length), index), number(TILE))
        return self._build.load_vector(pointer, at, element, size)

    def _codes(self, word: Value, place: int) -> Value:
        """The signed codes at a place of 16 words, in the highest bits of an integer: as floats 2^(32-bits) times too large.

        So they need no shift to the right, and codes around 0 keep sums small.
        """
        build, shift = self._build, 32 - self._bits * (place + 1)
        if shift > 0:
            word = build.shl(word, constant(INT32, shift))
        if place > 0:  # of the first nothing else is left
            word = build.and_(word, constant(INT32, -(1 << (32 - self._bits))))
        return build.sitofp(word, vector(FLOAT))

    def _scale_and_origin(
        self, scales: Value, origins: Value, tile: Value, num_groups: Value, group: Value
    ) -> tuple[Value, Value | None]:
        """What the sum of products and the sum of activations are multiplied by; the latter None where that is 0."""
        build = self._build
        scale = self._floats(scales, tile, num_groups, group)
        middle = constant(FLOAT, float(1 << (self._bits - 1)))  # by which codes are less than they stand for
        match self._origin:
            case "none":
                origin = None
            case "zero_points":
                zeros = build.uitofp(self._vector_at(origins, tile, num_groups, group, INT8, 1), vector(FLOAT))
                origin = build.fmul(scale, build.fsub(middle, zeros))
            case _:
                origin = build.fma(scale, middle, self._floats(origins, tile, num_groups, group))
        return build.fmul(scale, constant(FLOAT, 2.0 ** (self._bits - 32))), origin

    def _floats(self, pointer: Value, tile: Value, num_groups: Value, group: Value) -> Value:
        values = self._vector_at(pointer, tile, num_groups, group, self._element, self._size)
        return values if self._element is FLOAT else self._build.fpext(values, vector(FLOAT))
