"""All before attention for few tokens over a weight in NormalFloat4: QKV product, rotation and the cache's update."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.nf4_qkv_rotary_store import nf4_qkv_rotary_store
from kernels.specs import nf4_linear, rotary_and_store

_LARGE: dict[str, Any] = {"num_columns": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096, 32/8 x 128": _LARGE | {"num_tokens": 1},
    "16 x 4096, 32/8 x 128": _LARGE | {"num_tokens": 16},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 192,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    num_blocks: int = 9,
    bias: bool = True,
    group_size: int = 64,
) -> Inputs:
    """Slots and positions as for `rotary_and_store`; the product's inputs as those of `nf4_linear`."""
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
    linear = nf4_linear.make_inputs(
        dtype,
        device,
        seed,
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=num_rows,
        block_size=group_size,
        bias=bias,
    )
    del linear["residual"]
    return linear | rotated


def bytes_moved(inputs: Inputs) -> int:
    """Everything of the product in, every head out, and each token's position, slot and angles."""
    product = [inputs[name] for name in ("x", "words", "codes", "steps", "means", "bias")]
    moved = sum(tensor.nbytes for tensor in product if tensor is not None)
    num_tokens = len(inputs["x"])
    heads = num_tokens * len(inputs["words"]) * inputs["x"].element_size()
    angles = num_tokens * inputs["cos_sin_cache"][0].nbytes
    return moved + heads + angles + inputs["positions"].nbytes + inputs["slot_mapping"].nbytes


OP = KernelOp(
    name="nf4_qkv_rotary_store",
    reference=nf4_qkv_rotary_store,
    make_inputs=make_inputs,
    # fp32 sums in another order; of 16 bits the reference rounds weights and the kernel levels, as far off either way, in both
    # of a pair.
    tolerances={
        torch.float32: Tolerance(4e-5, 2e-5),
        torch.bfloat16: Tolerance(4e-2, 1.6e-2),
        torch.float16: Tolerance(8e-3, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=nf4_linear.flops,
    shapes=SHAPES,
    mutates=frozenset({"key_cache", "value_cache"}),
)
