"""The gated activation of a Llama MLP, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.pdl import supports_pdl

# Bytes of the gate per program: with four warps, two 16-byte loads of each half are in flight per thread.
BLOCK_BYTES = 4096
# Up to so many tokens the columns are cut finer, so that more of the card's multiprocessors take part.
FEW_TOKENS = 16


@triton.jit
def gated(gate, up):
    """In their dtype, rounded to it before the product too, as the reference does."""
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_and_mul_kernel(
    output_ptr,
    x_ptr,
    stride_output_token,
    stride_x_token,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of a token's columns per program. Grid: (num_tokens * cdiv(INTERMEDIATE, BLOCK),)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    # The blocks of a token side by side: programs that run together then read neighbouring addresses.
    num_blocks: tl.constexpr = (INTERMEDIATE + BLOCK - 1) // BLOCK
    token = (program // num_blocks).to(tl.int64)
    column = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INTERMEDIATE
    gate_ptr = x_ptr + token * stride_x_token + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + INTERMEDIATE, mask=mask, other=0.0)
    tl.store(output_ptr + token * stride_output_token + column, gated(gate, up), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate the right half of each row by the SiLU of its left half.

    `y[t, i] = cast(silu(x[t, i])) * x[t, I + i]` with `silu(a) = a * sigmoid(a)` in fp32 up to the cast to `x.dtype`;
    after Shazeer, "GLU Variants Improve Transformer" (2020).

    Args:
        x: float32, bfloat16 or float16 [num_tokens, 2 * I], strides (any, 1), the gate and the up projection side by side
    Returns:
        x.dtype [num_tokens, I], contiguous; nothing is mutated.
    Raises:
        ValueError: a shape, dtype or stride is not as above, or x has an odd number of columns.
    """
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    num_tokens, columns = x.shape
    if columns % 2:
        raise ValueError(f"x has {columns} columns; expected an even number")
    intermediate = columns // 2

    output = torch.empty((num_tokens, intermediate), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    block, num_warps = BLOCK_BYTES // x.element_size(), 4
    if num_tokens <= FEW_TOKENS:
        block, num_warps = block // 4, 2
    pdl = supports_pdl(x.device)
    _silu_and_mul_kernel[(num_tokens * triton.cdiv(intermediate, block),)](
        output,
        x,
        output.stride(0),
        x.stride(0),
        INTERMEDIATE=intermediate,
        BLOCK=block,
        PDL=pdl,
        num_warps=num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output
