"""A draft model made of the target itself: its first layers, and its own final norm and output head behind them."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from backend.models.decoder import Decoder

SHARE = 3  # one layer in so many


def first_layers(model: Decoder) -> Decoder:
    """A decoder over the first third of another's layers, at least one. All weights are the other's own.

    Early exit as in draft and verify by self-speculation (Zhang et al. 2023, arXiv:2309.08168), without a choice of layers.
    """
    num_layers = max(1, model.config.num_layers // SHARE)
    draft = copy.copy(model)
    draft._modules = dict(model._modules)
    draft.layers = nn.ModuleList(list(model.layers)[:num_layers])
    sliding = tuple(layer for layer in model.config.sliding_layers if layer < num_layers)
    draft.config = replace(model.config, num_layers=num_layers, sliding_layers=sliding)
    return draft
