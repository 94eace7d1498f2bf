"""`cache.dtype`: what a quantized KV cache must not change, what it holds more, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend.core.kv_format import KV_FORMATS
from backend.engine.engine_host import EngineHost
from backend.engine.loading import _prefix_key
from backend.errors import ConfigError
from backend.models.model_config import load_decoder_config
from backend.models.sources import resolve_source
from tests.engine.driving import answers, config_of, tokens
from tests.engine.test_equivalence import prompts_of
from tests.engine.test_prefix_cache import prompts_with_common_beginnings
from tests.helpers import make_tiny_llama

QUANTIZED = ("fp8_e4m3", "int8", "int4")
GREEDY: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
PROMPTS = prompts_of([1, 15, 16, 17, 40, 100])


@pytest.fixture(scope="session")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads of 64."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "wide-llama", head_dim=64)


def layer_caches(host: EngineHost) -> list[Any]:
    return host._require().engine.executor._runner._layer_caches  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_tokens_do_not_depend_on_batch_chunks_or_preemption(host: EngineHost, tiny_llama: Path, dtype: str) -> None:
    host.load(config_of(tiny_llama, cache__dtype=dtype))
    stored = {tensor.dtype for cache in layer_caches(host) for tensor in (cache.key_cache, cache.value_cache)}
    assert stored == {{"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}[dtype]}
    alone: dict[str, list[int]] = {}
    for key, prompt in PROMPTS.items():
        alone |= tokens(host, {key: prompt}, **GREEDY)
    host.reset_prefix_cache()
    assert tokens(host, PROMPTS, **GREEDY) == alone, "batched"
    for budget in (3, 33):
        host.load(config_of(tiny_llama, cache__dtype=dtype, scheduler__max_num_batched_tokens=budget))
        assert tokens(host, PROMPTS, **GREEDY) == alone, f"in chunks of at most {budget}"
    host.load(config_of(tiny_llama, cache__dtype=dtype, cache__num_blocks=8))
    preempted = answers(host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in preempted.items()} == alone, "preempted"
    assert sum(answer.last.num_preemptions or 0 for answer in preempted.values()) > 0, "nothing was preempted"


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_prefix_caching_on_equals_off(host: EngineHost, tiny_llama: Path, dtype: str) -> None:
    prompts = prompts_with_common_beginnings()
    host.load(config_of(tiny_llama, cache__dtype=dtype, cache__enable_prefix_caching=False))
    expected = tokens(host, prompts, **GREEDY)
    host.load(config_of(tiny_llama, cache__dtype=dtype, scheduler__async_scheduling=True))
    for _ in range(2):
        collected = answers(host, prompts, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert sum(answer.last.num_cached_tokens or 0 for answer in collected.values()) > 0


def test_tokens_of_four_bits_are_not_those_of_the_models_own_dtype(host: EngineHost, tiny_llama: Path) -> None:
    """Or the tests above would hold of a setting that does nothing."""
    host.load(config_of(tiny_llama))
    plain = tokens(host, PROMPTS, **GREEDY)
    host.load(config_of(tiny_llama, cache__dtype="int4"))
    assert tokens(host, PROMPTS, **GREEDY) != plain


def test_the_same_bytes_hold_more_blocks(host: EngineHost, wide_llama: Path) -> None:
    """Against bfloat16 at a head_dim of 64: 128 bytes a vector, and 66, 66 and 36."""
    blocks = {}
    for dtype in ("auto", *QUANTIZED):
        settings = {"model__dtype": "bfloat16", "cache__cpu_bytes": 2**25, "scheduler__max_num_seqs": 128}
        info = host.load(config_of(wide_llama, cache__dtype=dtype, **settings))
        tensors = [tensor for cache in layer_caches(host) for tensor in cache.tensors()]
        held = sum(tensor.nbytes for tensor in tensors)
        blocks[dtype] = len(tensors[0])  # the null block is one
        assert all(len(tensor) == blocks[dtype] for tensor in tensors)
        assert held == info.load["kv_cache_bytes"] == blocks[dtype] * 16 * info.load["kv_bytes_per_token"]
        assert 2**25 - held < 16 * info.load["kv_bytes_per_token"], "no further block fits"
    assert blocks["int8"] / blocks["auto"] >= 1.93
    assert blocks["fp8_e4m3"] / blocks["auto"] >= 1.93
    assert blocks["int4"] / blocks["auto"] >= 3.5


def test_int4_takes_a_head_dim_that_is_a_power_of_two(host: EngineHost, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "odd", head_dim=24)
    with pytest.raises(ConfigError) as caught:
        host.load(config_of(model, cache__dtype="int4"))
    assert str(caught.value) == (
        "cache.dtype = 'int4': it takes a head_dim that is a power of two, and this model's is 24; "
        "allowed are 'auto', 'fp8_e4m3', 'int8'"
    )
    host.load(config_of(model, cache__dtype="int8"))
    assert len(tokens(host, {"a": [1, 2, 3]}, **GREEDY)["a"]) == 12


def test_blocks_of_one_kv_dtype_are_not_found_by_another(tiny_llama: Path) -> None:
    source, decoder_config = resolve_source(str(tiny_llama)), load_decoder_config(tiny_llama)
    keys = {
        _prefix_key(
            config_of(tiny_llama, cache__dtype=dtype).resolve(device="cpu", max_model_len=100), source, decoder_config
        )
        for dtype in KV_FORMATS
    }
    assert len(keys) == 4
    assert None not in keys


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_on_a_gpu_nothing_changes_the_tokens_bit_for_bit(host: EngineHost, wide_llama: Path, dtype: str) -> None:
    """CUDA graphs and launches op by op, steps ahead or not, chunks, preemption, warm and cold."""
    settings = {"model__device": "cuda", "model__dtype": "bfloat16", "kernels__batch_invariant": True}
    ways: list[dict[str, Any]] = [
        {},
        {"kernels__enforce_eager": True},
        {"scheduler__async_scheduling": False},
        {"scheduler__max_num_batched_tokens": 33},
        {"cache__num_blocks": 9},
        {"cache__enable_prefix_caching": False},
    ]
    expected = None
    for way in ways:
        host.load(config_of(wide_llama, cache__dtype=dtype, **settings | way))
        stored = {tensor.device.type for cache in layer_caches(host) for tensor in cache.tensors()}
        assert stored == {"cuda"}
        for _ in range(2):
            given = tokens(host, PROMPTS, **GREEDY)
            expected = expected or given
            assert given == expected, way
