"""`TokenCodes`: activations that are in 8 bits before a product with a weight of as many bits comes to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenCodes(NamedTuple):
    """Activations as `quantize_tokens` rounds them: `x[t, k] = codes[t, k] * scales[t]`."""

    codes: Tensor  # float8_e4m3fn or int8 [num_tokens, K], contiguous
    scales: Tensor  # float32 [num_tokens, 1], contiguous
    dtype: torch.dtype  # what they were rounded from, and what their product comes in
