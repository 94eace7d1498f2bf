"""All that decides what the KV of a token is keeps its blocks apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.core.block_hash import BlockHash
from backend.engine.loading import _prefix_key
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import DecoderConfig, Llama3Scaling
from backend.models.sources import ModelSource

SHAPE = DUMMY_SHAPES["tiny-windows"]
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)


def key(settings: dict[str, Any], shape: DecoderConfig = SHAPE, path: str = "/models/a") -> BlockHash:
    config = EngineConfig().with_overrides({"model.name": path} | settings).resolve(device="cpu", max_model_len=512)
    found = _prefix_key(config, ModelSource(path, "folder", path=Path(path)), shape)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"model.revision": "main"},
        {"model.dtype": "bfloat16"},
        {"cache.dtype": "int8"},
        {"quantization.method": "int8"},
        {"quantization.method": "int4", "quantization.bits": 3},
        {"quantization.method": "int4", "quantization.group_size": 32},
        {"quantization.method": "int4", "quantization.skip": ["*.down_proj"]},
    ],
    ids=str,
)
def test_of_the_config(settings: dict[str, Any]) -> None:
    assert key(settings) != key({})
    if len(settings) > 1:  # the last one alone decides, too
        assert key(settings) != key(dict(list(settings.items())[:-1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 50_000.0},
        {"rope_scaling": SCALING},
        {"sliding_window": 31},
        {"sliding_window": None, "sliding_layers": ()},
        {"sliding_layers": (3,)},
        {"num_layers": 5},
        {"rms_norm_eps": 1e-6},
    ],
    ids=str,
)
def test_of_the_model(changes: dict[str, Any]) -> None:
    assert key({}, replace(SHAPE, **changes)) != key({})


def test_of_the_files() -> None:
    assert key({}, path="/models/b") != key({})


def test_what_decides_how_fast_it_is_computed_is_not_in_it() -> None:
    assert key({"scheduler.max_num_seqs": 3, "scheduler.policy": "priority", "cache.num_blocks": 77}) == key({})
