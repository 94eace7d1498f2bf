"""`LayerOps`: which implementation of the elementwise ops and of a lone linear layer the layers call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.layers.linear import Linear
from kernels.reference.norm_embedding_and_features import norm_embedding_and_features
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.silu_and_mul import silu_and_mul


@dataclass(frozen=True, slots=True)
class LayerOps:
    """One implementation of each op; the signatures are those of `kernels.reference`, and of `library_linear`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    norm_embedding_and_features: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    linear: Callable[[Linear, Tensor, torch.dtype | None], Tensor]


def library_linear(linear: Linear, x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The module's own product, of float [num_tokens, in_features]: [num_tokens, out_features].

    Args:
        out_dtype: None: as the module gives it, x.dtype unless it is trained in another.
    """
    output = linear(x)
    return output if out_dtype is None else output.to(out_dtype)


REFERENCE_OPS = LayerOps(
    rms_norm=rms_norm,
    rotary_embedding=rotary_embedding,
    silu_and_mul=silu_and_mul,
    norm_embedding_and_features=norm_embedding_and_features,
    linear=library_linear,
)
