"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backend.layers.ops import LayerOps


class RMSNorm(nn.Module):
    def __init__(
        self, hidden_size: int, eps: float, *, ops: LayerOps, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device), False)
        self.eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """float [num_rows, hidden_size] -> same."""
        return self._ops.rms_norm(x, self.weight, self.eps)
