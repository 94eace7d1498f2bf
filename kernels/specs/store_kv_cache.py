"""Writing keys and values to the paged cache."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.store_kv_cache import store_kv_cache
from kernels.specs.rotary_and_store import CACHES, empty_cache

SHAPES: dict[str, dict[str, Any]] = {
    "decode 64 x 8 x 128": {"num_tokens": 64, "num_kv_heads": 8, "head_dim": 128, "num_blocks": 513},
    "prefill 8192 x 8 x 128": {"num_tokens": 8192, "num_kv_heads": 8, "head_dim": 128, "num_blocks": 513},
    "prefill 512 x 3 x 64": {"num_tokens": 512, "num_kv_heads": 3, "head_dim": 64, "num_blocks": 65},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 21,
    num_kv_heads: int = 3,
    head_dim: int = 80,
    block_size: int = 16,
    num_blocks: int = 5,
    kv_dtype: str | None = None,
) -> Inputs:
    """`num_tokens` distinct slots, in no order, outside the null block; `kv_dtype` as for `rotary_and_store`."""
    generator = torch.Generator(device).manual_seed(seed)
    usable = (num_blocks - 1) * block_size
    slots = torch.randperm(usable, device=device, generator=generator)[:num_tokens] + block_size
    token_shape = (num_tokens, num_kv_heads, head_dim)
    return {
        "key": torch.randn(token_shape, dtype=dtype, device=device, generator=generator),
        "value": torch.randn(token_shape, dtype=dtype, device=device, generator=generator),
        "slot_mapping": slots,
        **empty_cache((num_blocks, block_size, num_kv_heads, head_dim), dtype, device, kv_dtype),
    }


def bytes_moved(inputs: Inputs) -> int:
    stored = sum(inputs[name][0, 0].nbytes for name in CACHES if inputs[name] is not None)
    read = inputs["key"].nbytes + inputs["value"].nbytes + inputs["slot_mapping"].nbytes
    return read + len(inputs["key"]) * stored


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="store_kv_cache",
    reference=store_kv_cache,
    make_inputs=make_inputs,
    # Bytes are copied, so they are equal.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"key_cache", "value_cache"}),
)
