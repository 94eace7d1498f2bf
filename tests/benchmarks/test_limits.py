"""What a step must move and compute, against closed forms, and figures that no card could give."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from backend.models.dummy import DUMMY_SHAPES
from benchmarks.figures import Figure
from benchmarks.limits import (
    CardLimits,
    believable,
    decode_bytes,
    layer_and_head_bytes,
    linear_parameters,
    prefill_flops,
)

CARD = CardLimits(copy_bytes_per_s=4.0e12, matmul_flops_per_s=8.0e14, read_bytes_per_s=4.4e12)


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "smollm2-135m", "tiny"])
def test_a_step_moves_all_weights_but_the_embedding_and_the_norms(shape: str) -> None:
    config = DUMMY_SHAPES[shape]
    norms = (2 * config.num_layers + 1) * config.hidden_size
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = config.count_parameters() - norms - embedding
    assert decode_bytes(asdict(config), 2, 1000, 3, 50.5) == 2 * weights + 3 * 50.5 * 1000


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "smollm2-135m"])
def test_layers_and_head_are_all_weights_but_an_embedding_of_its_own(shape: str) -> None:
    config = DUMMY_SHAPES[shape]
    norms = (2 * config.num_layers + 1) * config.hidden_size
    head = config.vocab_size * config.hidden_size
    weights_bytes = 2 * config.count_parameters()
    assert layer_and_head_bytes(asdict(config), 2, weights_bytes) == 2 * (
        linear_parameters(asdict(config)) + head + norms
    )


def test_prefill_flops_count_each_product_and_each_visible_pair() -> None:
    model = asdict(DUMMY_SHAPES["tiny"])
    pairs = sum(position + 1 for position in range(5))
    attention = model["num_layers"] * model["num_heads"] * pairs * 2 * (2 * model["head_dim"])
    assert prefill_flops(model, 3, 5) == 3 * (2 * linear_parameters(model) * 5 + attention)


@pytest.mark.parametrize(
    ("limit", "share", "problem"),
    [
        ("copy", 1.15, None),  # 4.60 of 4.62 TB/s that are 1.05 of what it reads
        ("copy", 1.16, "4,640 GB/s cannot be: this machine was measured at 4,400 GB/s it reads"),
        ("matmul", 1.049, None),
        ("matmul", 1.051, "840.80 TFLOP/s cannot be: this machine was measured at 800.00 TFLOP/s it multiplies"),
    ],
)
def test_a_figure_above_what_the_card_does_is_none(limit: Any, share: float, problem: str | None) -> None:
    figures = [
        Figure.of("m", "decode 1", "tok/s", [100.0], share=share, limit=limit),
        Figure.of("m", "mix", "tok/s", [7.0]),
        Figure("m", "decode 2", "tok/s", error="no room"),
    ]
    believed, lines = believable(figures, CARD)
    assert believed[1:] == figures[1:]
    if problem is None:
        assert (believed[0], lines) == (figures[0], [])
    else:
        assert believed[0].median is None
        assert (believed[0].error or "").startswith(problem)
        assert [line.startswith(f"m, decode 1: {problem}") for line in lines] == [True]
