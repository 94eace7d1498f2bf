"""A tiny model with a value in each group of ranges that stands out far, at a known place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers import load_oracle

HEAD_DIM = 8


def plant_outliers(folder: Path) -> dict[str, tuple[int, str, dict[str, int]]]:
    """Change a model of 9 query and 3 KV heads in its folder. Returns layer, part and outlier of each group of ranges.

    Each lies where no other group's values come from it, or where those planted in that group are far larger.
    """
    oracle: Any = load_oracle(folder)
    first, last = oracle.model.layers[1], oracle.model.layers[2]
    with torch.no_grad():
        last.mlp.down_proj.weight[5, 9] = 1e6  # behind all that is measured
        last.mlp.up_proj.weight[11] *= 1e4
        last.self_attn.v_proj.weight[2 * HEAD_DIM + 4] *= 100
        first.self_attn.q_proj.weight[4 * HEAD_DIM : 5 * HEAD_DIM] *= 1e4
    oracle.save_pretrained(folder)
    return {
        "weights": (2, "down", {"output": 5, "input": 9}),
        "activations": (2, "down", {"input": 11}),
        "KV": (2, "values", {"head": 2, "channel": 4}),
        "attention logits": (1, "scores", {"head": 4}),
    }
