"""Rotary position embedding and the cache's update in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.kv_quantization import DTYPES
from kernels.reference.rotary_and_store import rotary_and_store

CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")
NORM_WEIGHTS = ("q_norm_weight", "k_norm_weight")

SHAPES: dict[str, dict[str, Any]] = {
    "decode 64, 32/8 x 128": {"num_tokens": 64, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_blocks": 513},
    "decode 64, 32/8 x 128, int4": {
        "num_tokens": 64,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "num_blocks": 513,
        "kv_dtype": "int4",
    },
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
    kv_dtype: str | None = None,
    qk_norm: bool = False,
) -> Inputs:
    """`num_tokens` distinct slots, in no order, outside the null block; positions anywhere.

    Args:
        kv_dtype: of a quantized cache, "int8", "fp8_e4m3" or "int4"; None: `dtype`, without scales.
        qk_norm: whether queries and keys are normalised.
    """
    generator = torch.Generator(device).manual_seed(seed)
    usable = (num_blocks - 1) * block_size
    slots = torch.randperm(usable, device=device, generator=generator)[:num_tokens] + block_size
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(max_position, device=device)[:, None] * frequencies
    width = (num_heads + 2 * num_kv_heads) * head_dim
    inputs: Inputs = {
        "qkv": torch.randn(num_tokens, width, dtype=dtype, device=device, generator=generator),
        "positions": torch.randint(max_position, (num_tokens,), device=device, generator=generator),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "slot_mapping": slots,
        "num_heads": num_heads,
        **empty_cache((num_blocks, block_size, num_kv_heads, head_dim), dtype, device, kv_dtype),
        **dict.fromkeys(NORM_WEIGHTS),
        "eps": 1e-5 if qk_norm else 0.0,
    }
    for name in NORM_WEIGHTS if qk_norm else ():
        inputs[name] = torch.randn(head_dim, dtype=dtype, device=device, generator=generator)
    return inputs


def make_unstored_inputs(dtype: torch.dtype, device: torch.device, seed: int, **sizes: Any) -> tuple[int, Inputs]:
    """What an op takes beside its QKV product, into a cache that is not quantized: rows of the product's weight, and inputs."""
    inputs = make_inputs(dtype, device, seed, **sizes)
    num_rows = inputs.pop("qkv").shape[1]
    for name in ("num_heads", *CACHES[2:], *NORM_WEIGHTS, "eps"):
        del inputs[name]
    return num_rows, inputs


def bytes_moved(inputs: Inputs) -> int:
    """Every head in and out, each token's position, slot and angles, and the weights of norms."""
    qkv: Tensor = inputs["qkv"]
    num_tokens, num_elements = len(qkv), qkv.element_size() * inputs["num_heads"] * inputs["cos_sin_cache"].shape[1]
    stored = sum(inputs[name][0, 0].nbytes for name in CACHES if inputs[name] is not None)
    angles = inputs["cos_sin_cache"][0].nbytes
    weights = sum(inputs[name].nbytes for name in NORM_WEIGHTS if inputs[name] is not None)
    return qkv.nbytes + num_tokens * (num_elements + stored + angles + 8 + 8) + weights


def flops(inputs: Inputs) -> int:
    """Two products and a sum per element of q and k, and as for `rms_norm`; what quantizing takes is not counted."""
    num_tokens, width = inputs["qkv"].shape
    num_kv_heads, head_dim = inputs["value_cache"].shape[2], inputs["cos_sin_cache"].shape[1]
    per_element = 3 if inputs["q_norm_weight"] is None else 3 + 4
    return per_element * num_tokens * (width - num_kv_heads * head_dim)


def empty_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, kv_dtype: str | None
) -> Inputs:
    """`CACHES` of [num_blocks, block_size, num_kv_heads, head_dim]."""
    *vectors, head_dim = shape
    data_dtype = dtype if kv_dtype is None else DTYPES[kv_dtype]
    width, num_scales = (head_dim // 2, 2) if data_dtype == torch.uint8 else (head_dim, 1)
    cache: Inputs = {name: torch.zeros(*vectors, width, dtype=data_dtype, device=device) for name in CACHES[:2]}
    if kv_dtype is None:
        return cache | dict.fromkeys(CACHES[2:])
    return cache | {name: torch.zeros(*vectors, num_scales, dtype=torch.float16, device=device) for name in CACHES[2:]}


OP = KernelOp(
    name="rotary_and_store",
    reference=rotary_and_store,
    make_inputs=make_inputs,
    # Without norms, whose sums may run in another order: the same fp32 products and sums, rounded at the same places.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"key_cache", "value_cache"}),
)
