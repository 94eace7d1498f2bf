"""A linear layer over integer codes of 2 to 8 bits with a scale per group of inputs."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from kernels.reference.int_words import from_chunks, unpack_words


def dequantize_int(
    words: Tensor, scales: Tensor, zero_points: Tensor | None, minimums: Tensor | None, bits: int, in_features: int
) -> Tensor:
    """`w = (q - z) * s`, or `w = q * s + m`, in float32 [out_features, in_features].

    Args:
        words: int32 [out_features, cdiv(in_features, 32 // bits)], see `kernels.reference.int_words`.
        scales: float [out_features, num_groups], of groups of in_features / num_groups inputs that follow one another.
        zero_points: uint8 or int16 [out_features, num_groups], or None: with no minimums either, 2^(bits-1).
        minimums: float [out_features, num_groups], or None.
    """
    codes = unpack_words(words, bits, in_features).float().view(*scales.shape, -1)
    scale = scales.float()[:, :, None]
    if minimums is not None:
        weight = codes * scale + minimums.float()[:, :, None]
    else:
        zero = zero_points.float()[:, :, None] if zero_points is not None else float(1 << (bits - 1))
        weight = (codes - zero) * scale
    return weight.flatten(1)


def int_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    minimums: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`y = x W^T + b + r`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    The weight is rounded to x's dtype, as tensor cores take it.

    Args: as `dequantize_int`, but words are in chunks, see `to_chunks`.
    """
    weight = dequantize_int(from_chunks(words, bits, x.shape[1]), scales, zero_points, minimums, bits, x.shape[1])
    product = F.linear(x, weight.to(x.dtype), bias)
    return product if residual is None else product + residual
