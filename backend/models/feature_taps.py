"""`FeatureTaps`: where a pass through a decoder leaves the hidden states behind some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FeatureTaps:
    layers: tuple[int, ...]  # behind so many layers each, ascending
    states: Tensor  # float [num_tokens, len(layers), hidden], of the residual stream

    @classmethod
    def empty(cls, layers: Sequence[int], num_tokens: int, like: Tensor) -> FeatureTaps:
        """Room for so many tokens; `like` is the decoder's embedding, float [vocab_size, hidden]."""
        states = torch.empty(num_tokens, len(layers), like.shape[1], dtype=like.dtype, device=like.device)
        return cls(tuple(layers), states)

    def place(self, num_layers: int, otherwise: Tensor) -> Tensor:
        """Where the residual stream behind so many layers is to be written: `otherwise`, float [num_tokens, hidden], if it is not
        asked for."""
        return self.states[:, self.layers.index(num_layers)] if num_layers in self.layers else otherwise

    def take(self, num_layers: int, residual: Tensor) -> None:
        """Copy the residual stream behind so many layers, float [num_tokens, hidden], if it is asked for."""
        if num_layers in self.layers:
            self.states[:, self.layers.index(num_layers)] = residual
