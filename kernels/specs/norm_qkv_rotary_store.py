"""All before attention for few tokens: the end of a norm, the QKV product, the rotation and the cache's update."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.norm_qkv_rotary_store import norm_qkv_rotary_store
from kernels.specs import rotary_and_store
from kernels.specs.linear_inputs import linear_input_bytes, make_linear_inputs, product_flops

_LARGE: dict[str, Any] = {
    "num_columns": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_parts": 64,
    "bias": False,
}
_CODES: dict[str, Any] = {"num_parts": 0, "bits": 4, "group_size": 128, "origin": "float"}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096, 32/8 x 128": _LARGE | {"num_tokens": 1},
    "16 x 4096, 32/8 x 128": _LARGE | {"num_tokens": 16},
    "64 x 4096, 32/8 x 128": _LARGE | {"num_tokens": 64},
    "1 x 4096, 32/8 x 128, int4 g128": _LARGE | _CODES | {"num_tokens": 1},
    "8 x 576, 9/3 x 64": {
        "num_tokens": 8,
        "num_columns": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "num_parts": 18,
        "bias": False,
    },
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 123,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    num_blocks: int = 9,
    num_parts: int = 3,
    bias: bool = True,
    bits: int = 0,
    group_size: int = 0,
    origin: str = "none",
) -> Inputs:
    """Slots and positions as for `rotary_and_store`.

    Args:
        num_parts: of the sums of squares of the norm before; 0 for an x that lacks no division.
        bits, group_size, origin: of a weight of codes, see `make_linear_inputs`; those go with num_parts = 0.
    """
    num_rows, rotated = rotary_and_store.make_unstored_inputs(
        dtype,
        device,
        seed,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
    )
    linear = make_linear_inputs(
        dtype,
        torch.Generator(device).manual_seed(seed),
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=num_rows,
        num_parts=num_parts,
        bias=bias,
        bits=bits,
        group_size=group_size,
        origin=origin,
    )
    return {"code_grid": None} | linear | rotated


def bytes_moved(inputs: Inputs) -> int:
    """Everything in, every head out, and each token's position, slot and angles."""
    x = inputs["x"]
    heads = len(x) * len(inputs["weight"]) * x.element_size()
    angles = len(x) * inputs["cos_sin_cache"][0].nbytes
    return linear_input_bytes(inputs) + heads + angles + inputs["positions"].nbytes + inputs["slot_mapping"].nbytes


OP = KernelOp(
    name="norm_qkv_rotary_store",
    reference=norm_qkv_rotary_store,
    make_inputs=make_inputs,
    # fp32 sums in another order, and so two values that are rounded to neighbours.
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),
        torch.float16: Tolerance(1e-4, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=product_flops,
    shapes=SHAPES,
    mutates=frozenset({"key_cache", "value_cache"}),
)
