"""All before attention for few tokens over weights and tokens in 8 bits: QKV product, rotation and the cache's update."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp
from kernels.reference.byte_qkv_rotary_store import byte_qkv_rotary_store
from kernels.specs import byte_gated_linear, rotary_and_store

_LARGE: dict[str, Any] = {"num_columns": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096, 32/8 x 128, fp8": _LARGE | {"num_tokens": 1},
    "16 x 4096, 32/8 x 128, fp8": _LARGE | {"num_tokens": 16},
    "1 x 4096, 32/8 x 128, int8": _LARGE | {"num_tokens": 1, "to": torch.int8},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 208,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    num_blocks: int = 9,
    bias: bool = True,
    to: torch.dtype = torch.float8_e4m3fn,
) -> Inputs:
    """Slots and positions as for `rotary_and_store`; the product's inputs as those of `byte_gated_linear`."""
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
    linear = byte_gated_linear.make_inputs(
        dtype,
        device,
        seed,
        num_tokens=num_tokens,
        num_columns=num_columns,
        intermediate=num_rows // 2,
        bias=bias,
        to=to,
    )
    return linear | rotated


def bytes_moved(inputs: Inputs) -> int:
    """Everything of the product in, every head out, and each token's position, slot and angles."""
    x, codes, scales, bias = (inputs[name] for name in ("x", "codes", "scales", "bias"))
    moved = sum(tensor.nbytes for tensor in (x.codes, x.scales, codes, scales, bias) if tensor is not None)
    num_tokens = len(x.codes)
    heads = num_tokens * len(codes) * x.dtype.itemsize
    angles = num_tokens * inputs["cos_sin_cache"][0].nbytes
    return moved + heads + angles + inputs["positions"].nbytes + inputs["slot_mapping"].nbytes


OP = KernelOp(
    name="byte_qkv_rotary_store",
    reference=byte_qkv_rotary_store,
    make_inputs=make_inputs,
    # fp32 sums in another order, of which a matrix unit keeps a few bits less, and so two values that are rounded to neighbours.
    tolerances=byte_gated_linear.OP.tolerances,
    bytes_moved=bytes_moved,
    flops=byte_gated_linear.flops,
    shapes=SHAPES,
    mutates=frozenset({"key_cache", "value_cache"}),
)
