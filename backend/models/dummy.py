"""Shapes that need no checkpoint: the speed and memory of a model without its weights.

Importing this takes no torch, so that models can be listed at once.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from backend.models.model_config import DecoderConfig, Llama3Scaling

if TYPE_CHECKING:
    from torch import nn

_STD = 0.02

# For tests and first tries: three query heads per KV head, and heads that do not add up to the hidden size.
_TINY = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=frozenset(),
    checkpoint_dtype="generated",
)

DUMMY_SHAPES: dict[str, DecoderConfig] = {
    "llama-3.1-8b": DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset(),
        checkpoint_dtype="generated",
    ),
    "qwen3-0.6b": DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset(),
        checkpoint_dtype="generated",
        qk_norm=True,
    ),
    "smollm2-135m": DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset(),
        checkpoint_dtype="generated",
    ),
    "tiny": _TINY,
    # Its last two layers see 32 tokens, the first two all: two KV groups, of which one never grows beyond its window.
    "tiny-windows": replace(
        _TINY, architecture="Qwen2ForCausalLM", num_layers=4, qkv_bias=True, sliding_window=32, sliding_layers=(2, 3)
    ),
}


def fill_with_random_weights(module: nn.Module, seed: int = 0, prefix: str = "") -> None:
    """Draw every parameter from normal(0, 0.02), norm weights (the vectors) from normal(1, 0.02), where it lies.

    Equal seeds and names give equal weights on one kind of device. Every layer has its own: zero or shared weights would
    make caches, compression and numerics look better than they are. What is on no device yet is left alone.

    Args:
        prefix: of the parameters' names, for a part of a model.
    """
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters(prefix):
            if not parameter.is_meta:
                generator = torch.Generator(parameter.device).manual_seed(seed + zlib.crc32(name.encode()))
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, _STD, generator=generator)
