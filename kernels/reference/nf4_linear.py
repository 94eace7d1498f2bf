"""A linear layer over weights in NormalFloat4 with double quantization (QLoRA, arXiv:2305.14314)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.reference.int_words import unpack_words
from kernels.reference.nf4_words import from_nf4_chunks

# Appendix E of the paper: 8 quantiles of the normal distribution above 0 and 7 below it, from probability
# 1 - (1/30 + 1/32) / 2 on in equal steps to 1/2, over the largest one; and 0, which is exact. Digits as published.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def dequantize_magnitudes(codes: Tensor, steps: Tensor, means: Tensor) -> Tensor:
    """The largest magnitude of each block, `m + d * c`, float32 [out_features, num_blocks], never below 0.

    Args:
        codes: int8 [out_features, num_blocks].
        steps, means: bfloat16 [out_features, 1].
    """
    return codes.float() * steps.float() + means.float()


def dequantize_nf4(words: Tensor, codes: Tensor, steps: Tensor, means: Tensor, in_features: int) -> Tensor:
    """`w = level[q] * (m + d * c)`, in float32 [out_features, in_features].

    Args:
        words: int32 [out_features, cdiv(in_features, 8)], codes q of 4 bits, see `kernels.reference.int_words`.
        codes, steps, means: of the blocks' largest magnitudes, see `dequantize_magnitudes`. A block is
            in_features / num_blocks inputs that follow one another.
    """
    magnitudes = dequantize_magnitudes(codes, steps, means)
    levels = torch.tensor(NF4_LEVELS, device=words.device)
    weight = levels[unpack_words(words, 4, in_features).int()].view(*codes.shape, -1)
    return (weight * magnitudes[:, :, None]).flatten(1)


def nf4_linear(
    x: Tensor,
    words: Tensor,
    codes: Tensor,
    steps: Tensor,
    means: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`y = x W^T + b + r`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    The weight is rounded to x's dtype, as tensor cores take it.

    Args: as `dequantize_nf4`, but words are in chunks, see `to_nf4_chunks`.
    """
    weight = dequantize_nf4(from_nf4_chunks(words, x.shape[1]), codes, steps, means, x.shape[1])
    product = F.linear(x, weight.to(x.dtype), bias)
    return product if residual is None else product + residual
