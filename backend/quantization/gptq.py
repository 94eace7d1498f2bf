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
    # float64: float32 loses the inverse of Hessians as ill-conditioned as those of real inputs.
    order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = _inverse_factor(hessian.double()[order][:, order])
    remaining = weight.double()[:, order]
    group_size = weight.shape[1] // grid.scales.shape[1]
    columns, inputs = _GridColumns(grid, bits), order.tolist()
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, weight.shape[1], block):
        end = min(start + block, weight.shape[1])
        errors = torch.empty_like(remaining[:, start:end])
        for index in range(start, end):
            column = remaining[:, index]
            code, rounded = columns.round(column, inputs[index] // group_size)
            codes[:, inputs[index]] = code
            error = (column - rounded) / upper[index, index]
            remaining[:, index:end] -= torch.outer(error, upper[index, index:end])
            errors[:, index - start] = error
        remaining[:, end:] -= errors @ upper[start:end, end:]
    return pack(codes, grid, bits)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper U with U^T U = H^-1, of a damped H: row i says how the error of input i is shared out among the later ones."""
    diagonal = hessian.diagonal()  # a view
    mean = diagonal.mean() if diagonal.any() else diagonal.new_ones(())
    diagonal[diagonal == 0] = mean
    diagonal += DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True)


class _GridColumns:
    """A grid as seen by one input: of every output, the point next to a number."""

    def __init__(self, grid: Grid, bits: int) -> None:
        self._scales = grid.scales.double()
        self._top = (1 << bits) - 1
        if grid.minimums is not None:
            self._zeros, self._minimums = torch.zeros_like(self._scales), grid.minimums.double()
        else:
            middle = torch.full_like(self._scales, 1 << (bits - 1))
            self._zeros, self._minimums = (middle if grid.zeros is None else grid.zeros.double()), None

    def round(self, column: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes uint8 [out_features] next to float64 `column`, and what they stand for."""
        scale, zero = self._scales[:, group], self._zeros[:, group]
        minimum = 0.0 if self._minimums is None else self._minimums[:, group]
        steps = torch.where(scale > 0, (column - minimum) / scale, 0.0).round()
        code = (steps + zero).clamp(0, self._top)
        return code.to(torch.uint8), (code - zero) * scale + minimum
