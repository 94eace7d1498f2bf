"""The gate and up projections of an MLP, the end of a norm before and SiLU-and-multiply after, in plain torch."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.code_grid import CodeGrid
from kernels.reference.projection import project
from kernels.reference.silu_and_mul import silu_and_mul


def norm_gated_linear(
    x: Tensor,
    weight: Tensor,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    code_grid: CodeGrid | None = None,
) -> Tensor:
    """Division of a deferred norm, merged gate and up product, SiLU and multiply.

    `y[t, i] = cast(silu(g[t, i]) * g[t, I + i])` with `g[t, n] = sum_k x[t, k] * weight[n, k] / rms[t] + bias[n]` in fp32
    and `rms` as in `norm_linear`.

    Args:
        x: float [num_tokens, K]
        weight: x.dtype [2 * I, K]: the gate's rows, then the up projection's
        square_sums: float32 [num_tokens, num_parts]: of the x that lacks its norm's division, see `DeferredNorm`; None
            where x needs none
        eps: of the norm, added to the mean square
        bias: x.dtype [2 * I]
        code_grid: makes the weight one of codes, int32 as `CodeGrid` says
    Returns:
        x.dtype [num_tokens, I]. Nothing is mutated.
    """
    return silu_and_mul(project(x, weight, square_sums, eps, bias, code_grid)).to(x.dtype)
