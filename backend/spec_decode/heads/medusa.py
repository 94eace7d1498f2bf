"""`MedusaHeads`: one block per token ahead, all reading the same: the target's last hidden state and the token that it gave.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), over the target's own
output head instead of one for each block. A block that knows the token behind the hidden state predicts better (Ankner et al.,
"Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", 2024); here all know that one, and none of the drafted ones, so
that they stay side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.layers.linear import Linear

_FUSION_SCALE = 8 / 3  # hidden units of the fusion, for each of the target's


class MedusaHeads(nn.Module):
    """`y_j = x + V_j silu(W_j x + b_j)` with `x = fuse(...)`. Parameters are uninitialised until loaded or `initialize`d."""

    def __init__(self, hidden_size: int, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = num_heads
        width = round(_FUSION_SCALE * hidden_size)
        self.fusion_up = Linear(2 * hidden_size, width, bias=True, dtype=dtype, device=device)
        self.fusion_down = Linear(width, hidden_size, bias=False, dtype=dtype, device=device)
        self.blocks = Linear(hidden_size, num_heads * hidden_size, bias=True, dtype=dtype, device=device)
        self.outputs = nn.Parameter(torch.empty(num_heads, hidden_size, hidden_size, dtype=dtype, device=device), False)

    def fuse(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What the heads read of a token, float [num_tokens, hidden].

        Args:
            hidden: float [num_tokens, hidden], the target's hidden states after its final norm.
            embedded: float [num_tokens, hidden], the embeddings of the tokens behind.
        """
        size = hidden.shape[-1:]
        both = torch.cat((F.rms_norm(hidden, size), F.rms_norm(embedded, size)), dim=-1)
        return hidden + self.fusion_down(F.silu(self.fusion_up(both)))

    def forward(self, fused: Tensor) -> Tensor:
        """What `fuse` gave, to float [num_tokens, num_heads, hidden].

        Of token i, the target's output head makes of head j (from 0) the logits of token i + j + 2, and of the hidden state
        itself those of token i + 1.
        """
        units = F.silu(self.blocks(fused)).view(-1, self.num_heads, fused.shape[-1])
        return fused[:, None] + torch.matmul(units.transpose(0, 1), self.outputs).transpose(0, 1)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Zeros behind drawn weights: each head begins as the target's own, as in the paper.

        Args:
            generator: on the CPU, so that a seed gives the same weights for every device.
        """
        for name, parameter in self.named_parameters():
            if name in ("fusion_up.weight", "blocks.weight"):
                drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                parameter.copy_(drawn)
            else:
                parameter.zero_()
