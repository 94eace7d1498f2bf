"""What can stand in a decoder layer's MLP slot: any module from [num_tokens, hidden] to the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backend.layers.linear import Linear
from backend.layers.ops import LayerOps
from backend.models.model_config import DecoderConfig


class DenseMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, config: DecoderConfig, *, ops: LayerOps, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden_size, intermediate_size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._ops = ops

    def forward(self, hidden: Tensor) -> Tensor:
        """float [num_tokens, hidden] -> same."""
        return self.down(self._ops.silu_and_mul(self.gate_up(hidden)))
