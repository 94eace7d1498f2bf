"""Products with weights in 8 bits and NormalFloat4, in float64: what ops with such a product in them are held against."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.reference.nf4_linear import dequantize_nf4
from kernels.reference.nf4_words import from_nf4_chunks
from kernels.reference.token_codes import TokenCodes


def stored_product(inputs: dict[str, Any]) -> Tensor:
    """[num_tokens, num_rows] on the CPU, bias included. Storage itself is held against the formats elsewhere."""
    x = inputs["x"]
    if isinstance(x, TokenCodes):
        weight = inputs["codes"].double() * inputs["scales"].double()
        x = x.codes.double() * x.scales.double()
    else:
        words = from_nf4_chunks(inputs["words"], x.shape[1])
        magnitudes = (inputs["codes"], inputs["steps"], inputs["means"])
        weight, x = dequantize_nf4(words, *magnitudes, x.shape[1]).double(), x.double()
    product = x.cpu() @ weight.cpu().t()
    return product if inputs["bias"] is None else product + inputs["bias"].double().cpu()
