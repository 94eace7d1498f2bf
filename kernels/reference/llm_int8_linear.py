"""A linear layer over int8 weights whose inputs with outliers are not rounded: LLM.int8() (arXiv:2208.07339)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from kernels.reference.int8_linear import dequantize_int8, scaled_int8_product


def llm_int8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, *, threshold: float
) -> Tensor:
    """`y = x W^T + b`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    An input of which any token has a value of at least `threshold` is multiplied in x's dtype, for all tokens; the others
    as in `int8_linear`, each token's scale taken over them alone: 127.5 steps to the largest magnitude, where the paper has
    127. So what a token gets depends on the tokens beside it.

    Exact are the activations of outlier inputs. Their weights are the int8 ones in x's dtype, as bitsandbytes recovers
    them: the paper's 16-bit columns cannot be kept, as which they are is known only at run time.

    Args:
        codes: int8 [out_features, in_features].
        scales: float32 [out_features, 1], `w = code * scale`.
        bias: float [out_features].
        threshold: above 0; the paper's is 6.0.
    """
    is_outlier = (x.abs() >= threshold).any(dim=0)
    # Zeros in the place of the others instead of fewer columns: their number would have to be known to the host.
    y = F.linear(x.where(is_outlier, 0.0), dequantize_int8(codes, scales).to(x.dtype)).float()
    y = y + scaled_int8_product(x.where(~is_outlier, 0.0), codes, scales)
    return (y if bias is None else y + bias.float()).to(x.dtype)
