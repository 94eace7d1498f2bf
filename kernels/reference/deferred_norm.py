"""`DeferredNorm`: an RMS norm split over the kernels around it, so that it needs none of its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeferredNorm(NamedTuple):
    """An RMS norm that lacks its division: `rms_norm(x) = scaled / sqrt(square_sums.sum(1) / K + eps)`.

    The norm, `x * weight / rms(x)`, is linear in x but for one factor per token. So whoever makes x also gives
    `x * weight` and the sums of squares of parts of its columns; the product that follows runs on the former and divides
    by the root mean square at its end. Nothing is added in an order that could change.
    """

    scaled: Tensor  # x.dtype [num_tokens, K], x * weight
    square_sums: Tensor  # float32 [num_tokens, num_parts]
