"""`gptq`: codes chosen one input after the other, each one's error made up for by the inputs still to come.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022, arXiv:2210.17323.

Inputs go in descending order of their mean square ("act-order"). Every group keeps the grid that just holds its weights as
they were, fixed before the order is changed ("static groups"): groups stay runs of neighbouring inputs, and what is stored
needs no index of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quantization.int_weight import Grid, IntWeight, ZeroPoint, fit_grid, pack

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
_BLOCK = 128  # inputs after whose choice the others are made up to date


def quantize_gptq(
    weight: Tensor, hessian: Tensor, bits: int, group_size: int, zero_point: ZeroPoint, *, block: int = _BLOCK
) -> IntWeight:
    """Choose codes that keep the outputs rather than the weights.

    An input that was never other than 0 has no say: its weights are rounded to the nearest code, as good a guess as any.

    Args:
        weight: float [out_features, in_features], finite. Projections side by side share their inputs, and one Hessian.
        hessian: float [in_features, in_features], the mean of x^T x over inputs x.
    """
    grid = fit_grid(weight.float(), bits, group_size, zero_point)
    num_inputs = weight.shape[1]
    group_size = num_inputs // grid.scales.shape[1]
    # float64: float32 loses the inverse of Hessians as ill-conditioned as those of real inputs.
    order = hessian.diagonal().argsort(descending=True, stable=True)
    shares = _shares(hessian.double()[order][:, order])
    groups, scales = order // group_size, grid.scales.double().t()
    zeros = _zeros(grid, bits)
    origins = -zeros.double().t() * scales if grid.minimums is None else grid.minimums.double().t()
    # An input a row, above what its code 0 stands for. Nothing in the loop waits for the device.
    remaining = weight.double().t()[order] - origins[groups]
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, num_inputs, block):
        end = min(start + block, num_inputs)
        steps = scales[groups[start:end]]
        divisors = steps.masked_fill(steps == 0, float("inf"))
        chosen, errors = torch.empty_like(steps), torch.empty_like(steps)
        for index in range(start, end):
            place = index - start
            torch.div(remaining[index], divisors[place], out=chosen[place]).round_().clamp_(0, (1 << bits) - 1)
            torch.addcmul(remaining[index], chosen[place], steps[place], value=-1, out=errors[place])
            remaining[index + 1 : end].addr_(shares[index, index + 1 : end], errors[place], alpha=-1)
        remaining[end:] -= shares[start:end, end:].t() @ errors
        codes[:, order[start:end]] = chosen.t().to(torch.uint8)
    has_step = (grid.scales > 0).repeat_interleave(group_size, dim=1)
    return pack(torch.where(has_step, codes, zeros.repeat_interleave(group_size, dim=1)), grid, bits)


def _shares(hessian: Tensor) -> Tensor:
    """Of a damped H: row i says which shares of the error of input i the later ones take over.

    It is the upper U with U^T U = H^-1, each row over its diagonal.
    """
    diagonal = hessian.diagonal()  # a view
    mean = torch.where(diagonal.any(), diagonal.mean(), 1.0)
    diagonal.copy_(torch.where(diagonal == 0, mean, diagonal) + DAMPING * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper = torch.linalg.cholesky(inverse, upper=True)
    return upper / upper.diagonal()[:, None]


def _zeros(grid: Grid, bits: int) -> Tensor:
    """uint8 [out_features, num_groups]: the code that stands for 0, or where it is 0 for the minimum."""
    if grid.zeros is not None:
        return grid.zeros
    return torch.full_like(grid.scales, 0 if grid.minimums is not None else 1 << (bits - 1), dtype=torch.uint8)
