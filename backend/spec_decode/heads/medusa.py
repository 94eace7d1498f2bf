"""`MedusaHeads`: one residual block per token ahead, all reading the target's last hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), over the target's own
output head instead of one for each block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.layers.linear import Linear


class MedusaHeads(nn.Module):
    """`y_j = x + silu(W_j x + b_j)`. Parameters are uninitialised until loaded or `initialize`d."""

    def __init__(self, hidden_size: int, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.blocks = Linear(hidden_size, num_heads * hidden_size, bias=True, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """The target's hidden states after its final norm, float [num_tokens, hidden], to [num_tokens, num_heads, hidden].

        Of token i, the target's output head makes of head j (from 0) the logits of token i + j + 2, and of the hidden state
        itself those of token i + 1.
        """
        return hidden[:, None] + F.silu(self.blocks(hidden).view(-1, self.num_heads, hidden.shape[-1]))

    @torch.no_grad()
    def initialize(self) -> None:
        """Zeros: each head begins as the target's own, as in the paper."""
        for parameter in self.parameters():
            parameter.zero_()
