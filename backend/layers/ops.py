"""`LayerOps`: which implementation of the elementwise ops the layers call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.silu_and_mul import silu_and_mul


@dataclass(frozen=True, slots=True)
class LayerOps:
    """One implementation of each op; the signatures are those of `kernels.reference`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]


REFERENCE_OPS = LayerOps(rms_norm=rms_norm, rotary_embedding=rotary_embedding, silu_and_mul=silu_and_mul)
