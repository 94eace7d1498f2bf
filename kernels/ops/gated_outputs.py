"""The end of a gate and up product's kernel: SiLU, multiply, and the output. Not an op: a device function."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_gated(output_ptr, gate, up, first_token, first_output, num_tokens, num_outputs, stride_output_token):
    """`silu(gate) * up` of fp32 [BLOCK_M, HALF], rounded once, to outputs from `first_output` on."""
    token = first_token + tl.arange(0, gate.shape[0])
    column = first_output + tl.arange(0, gate.shape[1])
    gated = gate / (1.0 + tl.exp(-gate)) * up
    output_ptrs = output_ptr + token[:, None].to(tl.int64) * stride_output_token + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < num_outputs)[None, :]
    tl.store(output_ptrs, gated.to(output_ptr.dtype.element_ty), mask=mask)
