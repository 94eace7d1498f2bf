"""A linear layer over int8 weights and activations, as `kernels.reference.int8_linear`: the same numbers bit for bit."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.llvm import (
    FLOAT,
    INT16,
    INT32,
    INT64,
    LANES,
    POINTER,
    CompiledModule,
    CountedLoop,
    FunctionBuilder,
    Value,
    constant,
    number,
    vector,
)
from kernels.cpu.row_tiles import TILE, from_row_tiles, to_row_tiles
from kernels.cpu.threads import over_tiles
from kernels.reference.int8_linear import LARGEST_CODE, LEAST_TOKEN_CODE, TOKEN_REACH

_PER_WORD = 4
_BLOCKS = (4, 1)  # tokens at once
_PAIRS = ir.VectorType(INT16, 2 * LANES)


def to_tiles(codes: Tensor) -> Tensor:
    """int8 [out_features, in_features] -> int32 [cdiv(out_features, 16), cdiv(in_features, 4), 16]: a word has four inputs."""
    padded = F.pad(codes, (0, -codes.shape[1] % _PER_WORD)).contiguous()
    return to_row_tiles(padded.view(torch.int32))


def from_tiles(words: Tensor, out_features: int, in_features: int) -> Tensor:
    """What `to_tiles` took."""
    return from_row_tiles(words, out_features).contiguous().view(torch.int8)[:, :in_features]


def int8_linear(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None = None, *, out_features: int) -> Tensor:
    """`y = x W^T + b`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    Args:
        words: int32 [cdiv(out_features, 16), cdiv(in_features, 4), 16] of `to_tiles`.
        scales: float32 [cdiv(out_features, 16), 1, 16], `w = code * scale`.
        bias: float [out_features].
    Raises:
        ValueError: x does not fit the weight.
    """
    num_tokens, in_features = x.shape
    num_tiles, num_words, _ = words.shape
    if num_words != -(-in_features // _PER_WORD) or x.device.type != "cpu":
        raise ValueError(f"x {list(x.shape)} on {x.device} for a weight of {num_words * _PER_WORD} inputs on a CPU")
    num_columns = -(-in_features // LANES) * LANES
    inputs = x.float()
    if num_columns > in_features:
        inputs = F.pad(inputs, (0, num_columns - in_features))
    inputs = inputs.contiguous()
    codes = torch.empty(num_tokens, num_columns, dtype=torch.int16)
    x_scales = torch.empty(num_tokens)
    y = torch.empty(num_tokens, num_tiles * TILE)
    kernel = compile_int8_linear()
    kernel["quantize"](inputs.data_ptr(), codes.data_ptr(), x_scales.data_ptr(), num_tokens, num_columns)
    multiply, pointers = kernel["multiply"], [tensor.data_ptr() for tensor in (codes, x_scales, words, scales, y)]

    def run(first: int, end: int) -> None:
        multiply(*pointers, num_tokens, first, end, num_words, num_columns, y.shape[1])

    over_tiles(run, num_tiles, num_tokens * in_features * y.shape[1])
    y = y[:, :out_features]
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


@cache
def compile_int8_linear() -> CompiledModule:
    module = ir.Module("int8_linear")
    _build_quantize(module)
    blocks = {tokens: _build_block(module, tokens) for tokens in _BLOCKS}
    build = FunctionBuilder(module, "multiply", [POINTER] * 5 + [INT64] * 6)
    *pointers, num_tokens, first, end, num_words, num_columns, stride = build.args
    tiles = CountedLoop(build, first, end)
    start = number(0)
    for tokens in _BLOCKS:
        steps = CountedLoop(build, start, build.sub(num_tokens, number(tokens - 1)), step=tokens)
        build.call(blocks[tokens], [*pointers, tiles.index, steps.index, num_words, num_columns, stride])
        steps.close()
        start = steps.index
    tiles.close()
    build.ret_void()
    return CompiledModule(module)


def _build_quantize(module: ir.Module) -> None:
    """Rounds rows as the reference does. Of each four codes the second and the third change places, see `_build_block`."""
    build = FunctionBuilder(module, "quantize", [POINTER] * 3 + [INT64] * 2)
    x, codes, scales, num_tokens, num_columns = build.args
    zeros = constant(FLOAT, 0.0)
    rows = CountedLoop(build, number(0), num_tokens)
    row = build.mul(rows.index, num_columns)

    def finite_at(column: Value) -> tuple[Value, Value]:
        """Values, 0 where they are not finite, and zeros, NaN there."""
        values = build.load_vector(x, build.add(row, column), FLOAT, 4)
        flags = build.fmul(values, zeros)
        return build.select(build.fcmp_ordered("==", flags, zeros), values, zeros), flags

    scan = CountedLoop(build, number(0), num_columns, (zeros, zeros), LANES)
    values, flags = finite_at(scan.index)
    largest = build.larger(build.vector_function("fabs", (values,)), scan.values[0])
    scan.close((largest, build.fadd(scan.values[1], flags)))
    scale = build.fdiv(build.reduce(build.larger, scan.values[0]), ir.Constant(FLOAT, TOKEN_REACH))
    flag = build.reduce(build.fadd, scan.values[1])
    build.store(build.fadd(scale, flag), build.at(scales, rows.index, FLOAT))

    scale = build.splat(scale)
    least, most = constant(FLOAT, LEAST_TOKEN_CODE), constant(FLOAT, LARGEST_CODE)
    places = [4 * four + place for four in range(LANES // 4) for place in (0, 2, 1, 3)]
    cast = CountedLoop(build, number(0), num_columns, (), LANES)
    values, _ = finite_at(cast.index)
    steps = build.select(build.fcmp_ordered(">", scale, zeros), build.fdiv(values, scale), zeros)
    steps = build.vector_function("roundeven", (steps,))
    steps = build.select(build.fcmp_ordered("<", steps, least), least, steps)
    steps = build.select(build.fcmp_ordered(">", steps, most), most, steps)
    rounded = build.fptosi(steps, vector(INT16))
    order = ir.Constant(vector(INT32), [ir.Constant(INT32, place) for place in places])
    rounded = build.shuffle_vector(rounded, rounded, order)
    build.store_vector(rounded, codes, build.add(row, cast.index), INT16, 2)
    cast.close()
    rows.close()
    build.ret_void()


def _build_block(module: ir.Module, tokens: int) -> ir.Function:
    """One tile's outputs for some tokens.

    A word's bytes become two vectors of 16-bit numbers, inputs 0 and 2, 1 and 3 of every row. Pairs of products then sum up
    in 32 bits, which is one instruction.
    """
    build = FunctionBuilder(module, f"block_{tokens}", [POINTER] * 5 + [INT64] * 5)
    build.function.linkage = "internal"
    codes, x_scales, words, scales, y, tile, token, num_words, num_columns, stride = build.args
    all_tokens = [build.add(token, number(index)) for index in range(tokens)]
    sums = CountedLoop(build, number(0), num_words, [constant(INT32, 0)] * (2 * tokens))
    at = build.mul(build.add(build.mul(tile, num_words), sums.index), number(TILE))
    word = build.bitcast(build.load_vector(words, at, INT32, 4), _PAIRS)
    eight = ir.Constant(_PAIRS, [ir.Constant(INT16, 8)] * (2 * LANES))
    weights = build.ashr(build.shl(word, eight), eight), build.ashr(word, eight)
    rows = [build.lshr(build.mul(index, num_columns), number(1)) for index in all_tokens]  # in pairs
    results = []
    for index, value in enumerate(sums.values):
        which, row = index % 2, rows[index // 2]
        pair = build.add(row, build.add(build.mul(sums.index, number(2)), number(which)))
        inputs = build.bitcast(build.load_splat(codes, pair, INT32), _PAIRS)
        results.append(build.add(value, _sum_pairs(build, weights[which], inputs)))
    sums.close(results)
    scale = build.load_vector(scales, build.mul(tile, number(TILE)), FLOAT, 4)
    for index, row in enumerate(all_tokens):
        total = build.sitofp(build.add(*sums.values[2 * index : 2 * index + 2]), vector(FLOAT))
        total = build.fmul(build.fmul(total, build.load_splat(x_scales, row, FLOAT)), scale)
        build.store_vector(total, y, build.add(build.mul(row, stride), build.mul(tile, number(TILE))), FLOAT, 4)
    build.ret_void()
    return build.function


def _sum_pairs(build: FunctionBuilder, a: Value, b: Value) -> Value:
    """int16 [32] each -> int32 [16], `a[2i] b[2i] + a[2i+1] b[2i+1]`."""
    wide = ir.VectorType(INT32, 2 * LANES)
    product = build.mul(build.sext(a, wide), build.sext(b, wide))
    evens, odds = (
        ir.Constant(vector(INT32), [ir.Constant(INT32, 2 * lane + first) for lane in range(LANES)]) for first in (0, 1)
    )
    return build.add(build.shuffle_vector(product, product, evens), build.shuffle_vector(product, product, odds))
