from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.reference.rotary_embedding import rotary_embedding


def cos_sin_cache(head_dim: int, max_position: int, theta: float = 10_000.0) -> Tensor:
    angles = torch.arange(max_position)[:, None] * theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (14, 2), (1, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_is_the_rotation_of_transformers(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=num_heads * head_dim, num_attention_heads=num_heads, head_dim=head_dim)
    positions = torch.tensor([0, 1, 5, 5, 900])
    query, key = torch.randn(5, num_heads, head_dim), torch.randn(5, num_kv_heads, head_dim)
    rotary = LlamaRotaryEmbedding(config)
    expected = apply_rotary_pos_emb(query[None], key[None], *rotary(query, positions[None]), unsqueeze_dim=2)
    cos, sin = (angles[0, :, : head_dim // 2] for angles in rotary(query, torch.arange(1024)[None]))
    cache = torch.cat((cos, sin), dim=-1)
    for ours, theirs in zip(rotary_embedding(query, key, positions, cache), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=1e-6, rtol=1e-6)


def test_rotates_each_pair_by_its_angle() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    positions = torch.tensor([0, 3, 7])
    rotated_query, _ = rotary_embedding(query, key, positions, cos_sin_cache(8, 16))
    for token, position in enumerate(positions.tolist()):
        for pair in range(4):
            turn = cmath.exp(1j * position * 10_000.0 ** -(2 * pair / 8))
            for head in range(2):
                x, y = query[token, head], rotated_query[token, head]
                expected = complex(x[pair], x[pair + 4]) * turn
                assert math.isclose(y[pair], expected.real, abs_tol=1e-5)
                assert math.isclose(y[pair + 4], expected.imag, abs_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once_at_the_end(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(4, 9, 64).to(dtype), torch.randn(4, 3, 64).to(dtype)
    positions, cache = torch.tensor([1, 2, 30, 400]), cos_sin_cache(64, 512)
    exact = rotary_embedding(query.float(), key.float(), positions, cache)
    for rounded, expected in zip(rotary_embedding(query, key, positions, cache), exact, strict=True):
        assert rounded.dtype == dtype
        assert torch.equal(rounded, expected.to(dtype))


def test_takes_slices_of_a_merged_projection_and_leaves_them() -> None:
    torch.manual_seed(0)
    merged = torch.randn(6, 15, 64)
    before = merged.clone()
    query, key, _ = merged.split((9, 3, 3), dim=1)
    positions, cache = torch.arange(6), cos_sin_cache(64, 16)
    rotated = rotary_embedding(query, key, positions, cache)
    for ours, expected in zip(
        rotated, rotary_embedding(query.contiguous(), key.contiguous(), positions, cache), strict=True
    ):
        assert torch.equal(ours, expected)
    assert torch.equal(merged, before)


def test_of_no_tokens() -> None:
    query, key = rotary_embedding(torch.empty(0, 9, 64), torch.empty(0, 3, 64), torch.arange(0), cos_sin_cache(64, 4))
    assert query.shape == (0, 9, 64)
    assert key.shape == (0, 3, 64)
