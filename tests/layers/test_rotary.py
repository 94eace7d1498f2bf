"""The table of rotary angles against transformers' own rotary module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend.layers.rotary import build_cos_sin_cache
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import DecoderConfig, Llama3Scaling

TINY = replace(DUMMY_SHAPES["tiny"], max_position_embeddings=4096)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, head_dim=96, rope_theta=500000.0),
        replace(TINY, head_dim=64, rope_theta=500000.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 256)),
        replace(TINY, head_dim=128, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    ],
)
def test_equals_transformers_at_every_position(config: DecoderConfig) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings, rope_parameters=rope
        )
    )
    cos, sin = oracle(torch.zeros(1), torch.arange(config.max_position_embeddings)[None])

    cache = build_cos_sin_cache(config, CPU)

    assert cache.shape == (config.max_position_embeddings, config.head_dim)
    assert cache.dtype == torch.float32
    half = config.head_dim // 2
    # An angle of 4096 has a float32 spacing of 5e-4, so two roundings of it may differ by that.
    torch.testing.assert_close(cache[:, :half], cos[0, :, :half], atol=1e-3, rtol=0)
    torch.testing.assert_close(cache[:, half:], sin[0, :, :half], atol=1e-3, rtol=0)
    torch.testing.assert_close(cache[:64, :half], cos[0, :64, :half], atol=1e-5, rtol=0)


def test_position_zero_is_no_rotation() -> None:
    cache = build_cos_sin_cache(TINY, CPU)
    assert torch.equal(cache[0, :8], torch.ones(8))
    assert torch.equal(cache[0, 8:], torch.zeros(8))
