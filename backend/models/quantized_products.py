"""A layer's products with weights in NormalFloat4 or 8 bits, and the ops around them, in as few launches as kernels allow."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.attention.metadata import LayerCache
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.layers.rms_norm import RMSNorm
from backend.quantization.fp8 import KernelFP8Weight
from backend.quantization.nf4 import KernelNF4Weight
from backend.quantization.w8a8_int8 import KernelW8A8Weight
from kernels.ops.byte_gated_linear import byte_gated_linear
from kernels.ops.byte_launch import MAX_FEW_TOKENS, has_whole_rows
from kernels.ops.byte_qkv_rotary_store import byte_qkv_rotary_store
from kernels.ops.nf4_gated_linear import nf4_gated_linear
from kernels.ops.nf4_qkv_rotary_store import nf4_qkv_rotary_store
from kernels.ops.rms_norm import rms_norm
from kernels.ops.rms_norm_quantize import rms_norm_quantize
from kernels.ops.silu_and_mul_quantize import silu_and_mul_quantize
from kernels.reference.token_codes import TokenCodes


def normed_product(residual: Tensor, norm: RMSNorm, linear: Linear | QuantizedLinear) -> Tensor:
    """The layer's own product of the norm, residual's dtype [num_tokens, out_features]."""
    takes = _takes_codes(linear)
    if takes is None:
        return linear(rms_norm(residual, norm.weight, norm.eps))
    weight, dtype = takes
    return weight.linear(_normed_codes(residual, norm, dtype), linear.bias)


def queries(
    residual: Tensor,
    norm: RMSNorm,
    qkv: Linear | QuantizedLinear,
    positions: Tensor,
    cos_sin_cache: Tensor,
    layer_cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor | None:
    """Those of the layer's product of the norm, rotated, [num_tokens, num_heads, head_dim]; keys and values are stored.

    All in the product's own kernel; None where that does not take the weight, or so many tokens.

    Args:
        layer_cache: not quantized.
    """
    if len(residual) > MAX_FEW_TOKENS or not isinstance(qkv, QuantizedLinear):
        return None
    rest = (positions, cos_sin_cache, layer_cache.key_cache, layer_cache.value_cache, slot_mapping, qkv.bias)
    packed, takes = qkv.packed, _takes_codes(qkv)
    if isinstance(packed, KernelNF4Weight):
        normed = rms_norm(residual, norm.weight, norm.eps)
        magnitudes = (packed.magnitude_codes, packed.magnitude_steps, packed.magnitude_means)
        return nf4_qkv_rotary_store(normed, packed.words, *magnitudes, *rest)
    if takes is None or not has_whole_rows(takes[0].codes):
        return None
    weight, dtype = takes
    return byte_qkv_rotary_store(_normed_codes(residual, norm, dtype), weight.codes, weight.scales, *rest)


def gated_product(residual: Tensor, norm: RMSNorm, gate_up: Linear | QuantizedLinear) -> Tensor | None:
    """SiLU and multiply of that, in the product's own kernel; None where that does not take the weight, or so many tokens."""
    if len(residual) > MAX_FEW_TOKENS or not isinstance(gate_up, QuantizedLinear):
        return None
    packed, takes = gate_up.packed, _takes_codes(gate_up)
    if isinstance(packed, KernelNF4Weight):
        normed = rms_norm(residual, norm.weight, norm.eps)
        magnitudes = (packed.magnitude_codes, packed.magnitude_steps, packed.magnitude_means)
        return nf4_gated_linear(normed, packed.words, *magnitudes, gate_up.bias)
    if takes is None or not has_whole_rows(takes[0].codes):
        return None
    weight, dtype = takes
    return byte_gated_linear(_normed_codes(residual, norm, dtype), weight.codes, weight.scales, gate_up.bias)


def add_gated_codes(residual: Tensor, gate_up: Tensor, down: Linear | QuantizedLinear) -> bool:
    """`residual += (silu(gate) * up) W^T + b` where W takes codes of tokens; whether it does."""
    takes = _takes_codes(down)
    if takes is not None:
        weight, dtype = takes
        weight.add_to(residual, TokenCodes(*silu_and_mul_quantize(gate_up, dtype), residual.dtype), down.bias)
    return takes is not None


def _takes_codes(linear: Linear | QuantizedLinear) -> tuple[KernelFP8Weight | KernelW8A8Weight, torch.dtype] | None:
    """The weight whose product takes codes of tokens, and their dtype; None: it takes tokens as they are."""
    if isinstance(linear, QuantizedLinear) and isinstance(linear.packed, KernelFP8Weight | KernelW8A8Weight):
        dtype = linear.packed.token_dtype
        return None if dtype is None else (linear.packed, dtype)
    return None


def _normed_codes(residual: Tensor, norm: RMSNorm, dtype: torch.dtype) -> TokenCodes:
    return TokenCodes(*rms_norm_quantize(residual, norm.weight, norm.eps, dtype), residual.dtype)
