"""The divergence of a quantized KV cache against two whole passes in float64, and the heads that are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.attention.reference import ReferenceAttention
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_format import KV_FORMATS
from backend.errors import ConfigError
from backend.experiments.kv_quality import KVQuality, measure_kv_quality
from backend.models.decoder import Decoder, DecoderLayer
from backend.models.dummy import DUMMY_SHAPES
from backend.models.loader import load_model
from backend.models.sources import ModelSource
from backend.tokenizer import load_tokenizer
from backend.worker.decoders import ReferenceDecoder
from backend.worker.kv_cache import KVCacheShape

CPU = torch.device("cpu")
# Three layers, two KV heads of 16.
CONFIG = replace(DUMMY_SHAPES["tiny"], vocab_size=128, num_layers=3, attention_bias=True, max_position_embeddings=1024)
IDS = torch.randint(128, (600,), generator=torch.Generator().manual_seed(5)).tolist()


def make_model() -> Decoder:
    model = Decoder(CONFIG, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if name.endswith("norm.weight"):
            parameter.mul_(0.2).add_(1)
        elif parameter.dim() == 2:
            parameter.mul_(1.0 if name == "embedding" else parameter.shape[1] ** -0.5)
    return model


def shape() -> KVCacheShape:
    return KVCacheShape(KVGroupSpec(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, 4), 16, torch.float32)


def measure(model: Decoder, **options: object) -> KVQuality:
    arguments = {"lengths": (200, 600), "device": "cpu"} | options
    return measure_kv_quality(ReferenceDecoder(model), ReferenceAttention(), shape(), IDS, **arguments)  # type: ignore[arg-type]


def log_probabilities(model: Decoder, name: str) -> Tensor:
    """float64 [600, vocab_size], of one whole pass."""
    positions = torch.arange(600)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 600], dtype=torch.int32),
        seq_lens=torch.tensor([600], dtype=torch.int32),
        block_table=torch.arange(38, 0, -1, dtype=torch.int32)[None],
        slot_mapping=(38 - positions // 16) * 16 + positions % 16,
        positions=positions,
        num_decodes=0,
    )
    caches = shape().with_format(KV_FORMATS[name]).allocate(38, CPU)
    hidden = model(torch.tensor(IDS), positions, caches, metadata, ReferenceAttention())
    return model.compute_logits(hidden).double().log_softmax(dim=-1)


def test_divergence_is_that_of_whole_passes() -> None:
    model = make_model()
    quality = measure(model)
    plain = log_probabilities(model, "auto")
    means = {}
    for name in ("fp8_e4m3", "int8", "int4"):
        quantized = log_probabilities(model, name)
        wanted = torch.nn.functional.kl_div(quantized, plain, reduction="none", log_target=True).sum(dim=-1)
        same = (plain.argmax(dim=-1) == quantized.argmax(dim=-1)).double()
        for divergence, length in zip(quality.divergences[name], (200, 600), strict=True):
            assert divergence.num_tokens == length
            # Chunks round now and then to another code.
            assert divergence.mean == pytest.approx(float(wanted[:length].mean()), rel=0.02)
            assert divergence.last == pytest.approx(float(wanted[length - 128 : length].mean()), rel=0.05)
            assert divergence.largest == pytest.approx(float(wanted[:length].max()), rel=0.2)
            assert divergence.top1_agreement == pytest.approx(float(same[:length].mean()), abs=0.01)
        means[name] = quality.divergences[name][-1].mean
    assert 0 < means["int8"] < means["fp8_e4m3"] < means["int4"]


def test_a_head_with_an_outlier_is_named_and_no_other() -> None:
    model = make_model()
    assert measure(model).warnings() == []
    attention = cast(DecoderLayer, model.layers[1]).attention
    assert attention.qkv.bias is not None
    num_heads, size = attention.head_counts[0], CONFIG.head_dim
    channel = size - 1  # which turns by little, so that it stays the largest
    attention.qkv.bias[(num_heads + 1) * size + channel] = 400.0
    quality = measure(model, kv_dtypes=("int8", "int4"))
    worst = max(quality.heads, key=lambda head: head.outlier_ratio)
    assert (worst.layer, worst.kv_head, worst.channel) == (1, 1, channel)
    named = [warning.split(" keys")[0] for warning in quality.warnings() if "int8" in warning]
    assert named == ["layer 1, KV head 1: int8"]
    assert f"channel {channel} is " in next(warning for warning in quality.warnings() if "int8" in warning)
    # What the format gives away by its definition: a step of 400 / 127 over channels that vary by about 1.
    assert worst.errors["int8"] == pytest.approx(400 / 127 / 12**0.5, rel=0.5)
    assert len(quality.heads) == CONFIG.num_layers * CONFIG.num_kv_heads


def add_outlier(model: Decoder, layer: int, kv_head: int, channel: int, factor: float) -> None:
    """Keys that are larger in a pair of channels that turn together, and queries smaller: the products stay."""
    attention = cast(DecoderLayer, model.layers[layer]).attention
    num_heads, num_kv_heads, _ = attention.head_counts
    size, group = attention.head_dim, num_heads // num_kv_heads
    factors = torch.ones(sum(attention.head_counts), size)
    pair = [channel, (channel + size // 2) % size]
    factors[num_heads + kv_head, pair] = factor
    factors[kv_head * group : (kv_head + 1) * group, pair] = 1 / factor

    def scale(module: torch.nn.Module, args: object, heads: Tensor) -> Tensor:
        return heads * factors.flatten()

    attention.qkv.register_forward_hook(scale)


@pytest.mark.parametrize(("factor", "breaks"), [(8.0, False), (112.0, True)])
def test_a_head_is_named_when_it_alone_breaks_the_output(factor: float, breaks: bool) -> None:
    """The model stays the same function, so that all that int4 costs beyond what it cost before is that head's."""
    model = make_model()
    plain, before = log_probabilities(model, "auto"), measure(model)
    add_outlier(model, layer=0, kv_head=1, channel=7, factor=factor)
    assert torch.allclose(log_probabilities(model, "auto"), plain, atol=1e-4)
    after = measure(model)
    alone = {name: rows[-1].mean - before.divergences[name][-1].mean for name, rows in after.divergences.items()}
    assert (alone["int4"] >= 0.01) == breaks
    assert max(alone["int8"], alone["fp8_e4m3"]) < 0.01, "which hold it"
    named = [warning.split(" keys")[0] for warning in after.warnings()]
    assert named == (["layer 0, KV head 1: int4"] if breaks else [])


@pytest.mark.slow
def test_the_default_model_has_no_broken_head_until_one_is_broken(smollm2: ModelSource) -> None:
    loaded = load_model(smollm2, device=CPU, dtype=torch.float32)
    config = loaded.config
    group = KVGroupSpec(config.num_layers, config.num_kv_heads, config.head_dim, 4)
    token_ids = load_tokenizer(smollm2).encode(Path("README.md").read_text(encoding="utf-8"))[:200]

    def measured() -> KVQuality:
        decoder, cache = ReferenceDecoder(loaded.model), KVCacheShape(group, 16, torch.float32)
        return measure_kv_quality(
            decoder, ReferenceAttention(), cache, token_ids, lengths=(200,), device="cpu", kv_dtypes=("int4",)
        )

    before = measured()
    assert before.warnings() == []
    add_outlier(loaded.model, layer=1, kv_head=0, channel=56, factor=20.0)
    after = measured()
    assert after.divergences["int4"][0].mean - before.divergences["int4"][0].mean >= 0.01
    assert [warning.split(" keys")[0] for warning in after.warnings()] == ["layer 1, KV head 0: int4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (601,)}, "the text has 600 tokens, and the longest length is 601"),
        ({"lengths": (128, 200)}, "a length of 128 tokens is too short to measure at; more than 128 are needed"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(make_model(), **options)
