"""The gate and up projections of an MLP over weights and tokens in 8 bits, for few tokens, and SiLU-and-multiply, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.byte_launch import MAX_FEW_TOKENS, check_byte_product, default_byte_tiles, few_tokens_options
from kernels.ops.byte_projection import load_scales, project_bytes
from kernels.ops.gated_outputs import store_gated
from kernels.ops.projection import Tiles, _split_halves
from kernels.reference.token_codes import TokenCodes


@triton.jit(do_not_specialize=["num_tokens"])
def _byte_gated_linear_kernel(
    output_ptr,
    x_ptr,
    x_scales_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    num_columns,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N / 2 gate rows and the up rows that belong to them per program.

    Grid: (cdiv(num_outputs, BLOCK_N / 2), cdiv(num_tokens, BLOCK_M)).
    """
    HALF: tl.constexpr = BLOCK_N // 2
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * HALF
    first_token = tl.program_id(1) * BLOCK_M
    column = first_row + tl.arange(0, HALF)
    gate_scale = load_scales(scales_ptr, column, num_outputs)
    up_scale = load_scales(scales_ptr + num_outputs, column, num_outputs)
    sums = project_bytes(
        x_ptr,
        words_ptr,
        first_row,
        num_outputs + first_row,
        2 * num_outputs,
        first_token,
        num_tokens,
        num_columns,
        stride_x_token,
        stride_words_row,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        SHARES,
        AHEAD,
        ONCE,
        ASM,
        PDL,
    )
    token = first_token + tl.arange(0, BLOCK_M)
    x_scale = tl.load(x_scales_ptr + token, mask=token < num_tokens, other=0.0)[:, None]
    gate, up = _split_halves(sums.to(tl.float32), BLOCK_M, HALF)
    gate = gate * x_scale * gate_scale[None, :]
    up = up * x_scale * up_scale[None, :]
    if BIAS:
        gate += tl.load(bias_ptr + column, mask=column < num_outputs, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + num_outputs + column, mask=column < num_outputs, other=0.0).to(tl.float32)[None, :]
    store_gated(output_ptr, gate, up, first_token, first_row, num_tokens, num_outputs, stride_output_token)


def byte_gated_linear(
    x: TokenCodes, codes: Tensor, scales: Tensor, bias: Tensor | None = None, *, tiles: Tiles | None = None
) -> Tensor:
    """Merged gate and up product of tokens and a weight in 8 bits, SiLU and multiply.

    `y[t, i] = cast(silu(g[t, i]) * g[t, I + i])` with `g[t, n] = sum_k x[t, k] * q[n, k] * s[n] + bias[n]` in fp32 and
    `x[t, k]` a code times its token's scale; sums are as in `fp8_linear` and `int8_linear`.

    Args:
        x: what `quantize_tokens` gives, at most 16 tokens of K codes, with a scale per token
        codes: x.codes' dtype, float8_e4m3fn or int8 [2 * I, K], strides (any, 1), rows of whole 16 bytes: the gate's rows, then
            the up projection's
        scales: float32 [2 * I, 1], contiguous
        bias: x.dtype [2 * I], stride (1,)
        tiles: how to cut the product, by default chosen from the sizes: a warp takes a share of the inputs, block_m is 1, 8 or
            16 and block_n a multiple of 16
    Returns:
        x.dtype [num_tokens, I], contiguous. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    check_byte_product(x, codes, scales, x.codes.dtype, bias)
    num_tokens, num_columns = x.codes.shape
    num_rows = codes.shape[0]
    if num_rows % 2:
        raise ValueError(f"codes have {num_rows} rows; gate and up together have an even number")
    if num_tokens > MAX_FEW_TOKENS:
        raise ValueError(f"x has {num_tokens} tokens; at most {MAX_FEW_TOKENS} are allowed")
    output = torch.empty((num_tokens, num_rows // 2), dtype=x.dtype, device=codes.device)
    if output.numel() == 0:
        return output
    tiles = tiles or default_byte_tiles(num_tokens, num_rows, num_columns)
    options = few_tokens_options(codes, tiles)
    words = codes.view(torch.int32)
    grid = (triton.cdiv(num_rows // 2, tiles.block_n // 2), triton.cdiv(num_tokens, tiles.block_m))
    _byte_gated_linear_kernel[grid](
        output,
        x.codes,
        x.scales,
        words,
        scales,
        bias,
        num_tokens,
        num_rows // 2,
        num_columns,
        output.stride(0),
        x.codes.stride(0),
        words.stride(0),
        BIAS=bias is not None,
        **options,
    )
    return output
