"""Rotary position embedding and the cache's update in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.rotary_and_store import rotary_and_store

SHAPES: dict[str, dict[str, Any]] = {
    "decode 64, 32/8 x 128": {"num_tokens": 64, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_blocks": 513},
    "prefill 8192, 32/8 x 128": {
        "num_tokens": 8192,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "num_blocks": 513,
    },
    "prefill 512, 9/3 x 64": {"num_tokens": 512, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "num_blocks": 65},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 21,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 80,
    block_size: int = 16,
    num_blocks: int = 5,
    max_position: int = 512,
) -> Inputs:
    """`num_tokens` distinct slots, in no order, outside the null block; positions anywhere."""
    generator = torch.Generator(device).manual_seed(seed)
    usable = (num_blocks - 1) * block_size
    slots = torch.randperm(usable, device=device, generator=generator)[:num_tokens] + block_size
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(max_position, device=device)[:, None] * frequencies
    width = (num_heads + 2 * num_kv_heads) * head_dim
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        "qkv": torch.randn(num_tokens, width, dtype=dtype, device=device, generator=generator),
        "positions": torch.randint(max_position, (num_tokens,), device=device, generator=generator),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "key_cache": torch.zeros(cache_shape, dtype=dtype, device=device),
        "value_cache": torch.zeros(cache_shape, dtype=dtype, device=device),
        "slot_mapping": slots,
        "num_heads": num_heads,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Every head in and out, and each token's position, slot and angles."""
    qkv: Tensor = inputs["qkv"]
    angles = len(qkv) * inputs["cos_sin_cache"][0].nbytes
    return 2 * qkv.nbytes + angles + inputs["positions"].nbytes + inputs["slot_mapping"].nbytes


def flops(inputs: Inputs) -> int:
    """Two products and a sum per element of q and k."""
    num_tokens, width = inputs["qkv"].shape
    _, _, num_kv_heads, head_dim = inputs["value_cache"].shape
    return 3 * num_tokens * (width - num_kv_heads * head_dim)


OP = KernelOp(
    name="rotary_and_store",
    reference=rotary_and_store,
    make_inputs=make_inputs,
    # The same fp32 products and sums, rounded at the same places.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"key_cache", "value_cache"}),
)
