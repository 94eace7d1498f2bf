"""What rounding costs a product, if errors were uniform noise: the closed form that measured errors are held to.

A value rounded to a grid of step d errs by u, uniform in [-d/2, d/2]: mean 0, variance d^2/12; one that is a code does not
err. With both factors rounded and all errors independent, an output y = sum_i x_i w_i errs by
sum_i (x_i u_i + v_i w_i + v_i u_i), so that

    E[error^2] = sum_i x_i^2 E[u_i^2] + E[v_i^2] w_i^2 + E[v_i^2] E[u_i^2].

Values below half a step become 0. That is no noise but what they were, and beside an outlier that may be nearly all of a
token: they are left out of the sums, and the square of what they would have given is added.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_error(x: Tensor, weight: Tensor, x_steps: Tensor, weight_steps: Tensor) -> float:
    """Root of the expected sum of squares over all tokens and outputs.

    Args:
        x, x_steps: [num_tokens, in_features], a step of 0 where nothing is rounded.
        weight, weight_steps: [out_features, in_features].
    """
    x, weight, x_steps = x.double(), weight.double(), x_steps.double()
    kept = x.where(x.abs() >= x_steps / 2, 0.0)
    x_noise = (x_steps.square() / 12).where(kept != 0, 0.0)
    weight_noise = torch.where(weight.abs() < weight_steps / 2, weight.square(), weight_steps.double().square() / 12)
    noise = (kept.square() + x_noise) @ weight_noise.t() + x_noise @ weight.square().t()
    return float((noise + ((x - kept) @ weight.t()).square()).sum().sqrt())


def int8_steps(rows: Tensor, levels: int = 254) -> Tensor:
    """Of each value of [rows, columns]: a row from its largest magnitude to the negative of it in so many steps.

    Around 0, where their number is even; the largest magnitude is a code then.
    """
    magnitudes = rows.double().abs()
    largest = magnitudes.amax(1, keepdim=True)
    is_code = (magnitudes == largest) & (levels % 2 == 0)
    return (largest * 2 / levels).where(~is_code, 0.0)


def fp8_steps(rows: Tensor) -> Tensor:
    """The same in E4M3 with the largest magnitude of a row at 448: 2^-3 of the power of two below a value, at least 2^-9."""
    magnitudes = rows.double().abs()
    largest = magnitudes.amax(1, keepdim=True)
    exponents = (magnitudes * 448 / largest).clamp(min=2.0**-6).log2().floor()
    return (largest / 448 * torch.exp2(exponents - 3)).where(magnitudes != largest, 0.0)
