"""Random weights for shapes without a checkpoint."""

from __future__ import annotations

import pytest
import torch

from backend.models.decoder import Decoder
from backend.models.dummy import DUMMY_SHAPES, fill_with_random_weights
from backend.models.loader import load_model
from backend.models.sources import ModelSource
from backend.models.weight_slots import weight_slots
from tests.helpers import paged_logits

CPU = torch.device("cpu")


def tiny_slots(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    decoder = Decoder(DUMMY_SHAPES["tiny"], dtype=dtype, device=CPU)
    fill_with_random_weights(decoder, seed)
    return weight_slots(decoder)


def test_every_tensor_is_its_own_normal_sample() -> None:
    slots = tiny_slots()
    for name, tensor in slots.items():
        centred = tensor - 1 if name.endswith("norm.weight") else tensor
        assert (tensor != 0).all()
        assert 0.015 < centred.std() < 0.025, name
        assert centred.mean().abs() < 0.01, name
    flat = [tensor.flatten()[:32] for tensor in slots.values()]
    correlations = torch.corrcoef(torch.stack([values for values in flat if len(values) == 32]))
    assert (correlations - torch.eye(len(correlations))).abs().max() < 0.8


def test_equal_seeds_give_equal_weights() -> None:
    first, again, other = tiny_slots(0), tiny_slots(0), tiny_slots(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loads_without_files_and_runs(dtype: torch.dtype) -> None:
    progress: list[tuple[float, float]] = []
    loaded = load_model(
        ModelSource("dummy:tiny", "dummy", shape="tiny"),
        device=CPU,
        dtype=dtype,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert loaded.config is DUMMY_SHAPES["tiny"]
    assert loaded.notices == ()
    assert loaded.num_parameters == loaded.config.count_parameters()
    assert loaded.weights_bytes == loaded.num_parameters * dtype.itemsize
    assert progress[-1] == (loaded.weights_bytes, loaded.weights_bytes)
    logits = paged_logits(loaded.model, list(range(40)))
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_tiny_is_awkward_on_purpose() -> None:
    tiny = DUMMY_SHAPES["tiny"]
    group = tiny.num_heads // tiny.num_kv_heads
    assert group & (group - 1) != 0
    assert tiny.num_heads * tiny.head_dim != tiny.hidden_size
    assert tiny.vocab_size >= 256  # a byte per id
