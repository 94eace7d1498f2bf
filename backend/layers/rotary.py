"""The table of rotary angles, with Llama 3.1's scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.models.model_config import DecoderConfig, Llama3Scaling


def build_cos_sin_cache(config: DecoderConfig, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position's angles (Su et al., "RoFormer", 2021).

    Returns:
        float32 [max_position_embeddings, head_dim]: columns [0, head_dim / 2) are cosines, the rest sines.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _scale_llama3(frequencies, config.rope_scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow down the frequencies too low to have turned within the original context ("The Llama 3 Herd of Models").

    With t turns within the original context: unchanged for t >= high_freq_factor, divided by `factor` for
    t <= low_freq_factor, and blended linearly in t in between.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    unchanged = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (unchanged + (1 - unchanged) / scaling.factor)
