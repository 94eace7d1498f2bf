"""A norm that is split over the kernels around it is the norm: a whole decoder layer, kernel after kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.embed_tokens import embed_tokens
from kernels.ops.norm_gated_linear import norm_gated_linear
from kernels.ops.norm_linear import norm_linear
from kernels.ops.norm_qkv_rotary_store import norm_qkv_rotary_store
from kernels.ops.paged_decode_attention import paged_decode_attention
from kernels.ops.projection import Tiles
from kernels.reference.rms_norm import rms_norm
from kernels.specs import paged_decode_attention as attention_spec
from tests.kernels.oracle import naive_attention

HEADS: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16}
HIDDEN, INTERMEDIATE, WIDTH, EPS = 45, 52, 5 * 16, 1e-5


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape)


@pytest.fixture
def parameters(device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    weights = {
        "embedding": random(30, HIDDEN),
        "attention_norm": 1 + random(HIDDEN, scale=0.2),
        "qkv": random(WIDTH, HIDDEN, scale=HIDDEN**-0.5),
        "output": random(HIDDEN, 48, scale=48**-0.5),
        "mlp_norm": 1 + random(HIDDEN, scale=0.2),
        "gate_up": random(2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "down": random(HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        "final_norm": 1 + random(HIDDEN, scale=0.2),
        "head": random(30, HIDDEN),
    }
    return {name: value.to(device) for name, value in weights.items()}


def layer_in_float64(p: dict[str, Tensor], inputs: dict[str, Any], positions: Tensor, angles: Tensor) -> Tensor:
    """Logits of the tokens 1, 2, 3, norms by their definition; the cache is written where each request ends."""
    p = {name: value.double() for name, value in p.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight

    hidden = p["embedding"][[1, 2, 3]]
    heads = (norm(hidden, p["attention_norm"]) @ p["qkv"].t()).view(3, 5, 16)
    cos, sin = (part[:, None] for part in angles.double()[positions].chunk(2, dim=1))
    left, right = heads[:, :4].chunk(2, dim=2)
    rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=2)
    caches = {name: inputs[name].double() for name in ("key_cache", "value_cache")}
    for token, position in enumerate(positions.tolist()):
        place = int(inputs["block_table"][token, position // 16]), position % 16
        caches["key_cache"][place], caches["value_cache"][place] = rotated[token, 3:], heads[token, 4:]
    attended = naive_attention(**(inputs | caches | {"query": rotated[:, :3]}), query_start_loc=torch.arange(4))
    hidden = hidden + attended.to(hidden.device).flatten(1) @ p["output"].t()
    gate, up = (norm(hidden, p["mlp_norm"]) @ p["gate_up"].t()).chunk(2, dim=1)
    hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ p["down"].t()
    return norm(hidden, p["final_norm"]) @ p["head"].t()


@pytest.mark.parametrize("tiles", [Tiles(1, 16, 64, 4, 2), Tiles(16, 16, 32, 4, 2)], ids=str)
def test_a_layer_without_a_norm_kernel_is_the_layer(
    tiles: Tiles, parameters: dict[str, Tensor], device: torch.device
) -> None:
    p, inputs = parameters, attention_spec.make_inputs(torch.float32, device, seq_lens=[20, 1, 33], **HEADS)
    positions = inputs["seq_lens"].long() - 1
    slots = inputs["block_table"].gather(1, (positions // 16)[:, None])[:, 0].long() * 16 + positions % 16
    angles = torch.arange(40, device=device)[:, None] * 10_000.0 ** -(torch.arange(0, 16, 2, device=device) / 16)
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    expected = layer_in_float64(p, inputs, positions, cos_sin_cache)

    token_ids, rows = torch.tensor([1, -1, 3], device=device), torch.tensor([0, 1, 0], device=device)
    sampled = torch.tensor([9, 2], device=device)
    residual, deferred = embed_tokens(token_ids, rows, sampled, p["embedding"], p["attention_norm"])
    assert deferred is not None
    scaled, sums = deferred
    # Already here the pair is the norm.
    normed = scaled / (sums.sum(1, keepdim=True) / HIDDEN + EPS).sqrt()
    torch.testing.assert_close(normed, rms_norm(residual, p["attention_norm"], EPS))
    caches = (inputs["key_cache"], inputs["value_cache"])
    query = norm_qkv_rotary_store(scaled, p["qkv"], positions, cos_sin_cache, *caches, slots, sums, EPS, tiles=tiles)
    attended = paged_decode_attention(**(inputs | {"query": query})).flatten(1)
    _, deferred = norm_linear(
        attended, p["output"], residual=residual, next_norm_weight=p["mlp_norm"], output=residual, tiles=tiles
    )
    assert deferred is not None
    assert deferred.square_sums.shape[1] > 1
    gated = norm_gated_linear(deferred.scaled, p["gate_up"], deferred.square_sums, EPS, tiles=tiles)
    _, deferred = norm_linear(
        gated, p["down"], residual=residual, next_norm_weight=p["final_norm"], output=residual, tiles=tiles
    )
    assert deferred is not None
    logits, _ = norm_linear(deferred.scaled, p["head"], deferred.square_sums, EPS, tiles=tiles)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
