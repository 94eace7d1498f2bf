"""Perplexity as transformers' guide computes it, and the comparison with a reference by its definitions in float64."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.errors import CapacityError, ConfigError, ModelError
from backend.experiments.quality import Quality, load_pair, measure_quality, summarize
from backend.experiments.text_pass import TextModel, load_text_model
from backend.models.sources import ModelSource
from backend.tokenizer import load_tokenizer
from tests.helpers import dense_logits, load_oracle, make_tiny_llama, make_tiny_model

IDS = torch.randint(0, 512, (203,), generator=torch.Generator().manual_seed(1)).tolist()


def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), "folder", path=folder)


def load(folder: Path, **overrides: Any) -> TextModel:
    return load_text_model(source(folder), EngineConfig().with_overrides(overrides))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return load(folder)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


def guide_perplexity(oracle: Any, token_ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' guide, its losses weighted by the labels that the model's shift leaves."""
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(token_ids), stride):
        end = min(begin + window, len(token_ids))
        input_ids = torch.tensor([token_ids[begin:end]])
        labels = input_ids.clone()
        labels[:, : -(end - previous_end)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            with torch.inference_mode():
                total += float(oracle(input_ids, labels=labels).loss) * scored
            count += scored
        previous_end = end
        if end == len(token_ids):
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(
    ("window", "stride", "num_tokens"),
    [
        (64, 64, 203),  # the last one is shorter
        (64, 64, 129),  # the last one has a single token, which is its first
        (64, 24, 203),
        (64, 1, 80),
        (1024, 1024, 203),  # one for all
        (2, 2, 10),
    ],
)
def test_perplexity_is_that_of_the_guide(
    model: TextModel, folder: Path, window: int, stride: int, num_tokens: int
) -> None:
    quality = measure_quality(model, IDS, window=window, stride=stride, max_tokens=num_tokens)
    expected, count = guide_perplexity(load_oracle(folder), IDS[:num_tokens], window, stride)
    assert quality == Quality(perplexity=quality.perplexity, num_tokens=count)
    assert quality.perplexity == pytest.approx(expected, rel=1e-5)


def test_a_window_longer_than_a_step_and_a_model_with_attention_windows(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Mistral", sliding_window=40)
    token_ids = IDS * 3
    expected, count = guide_perplexity(load_oracle(folder), token_ids, 600, 600)
    quality = measure_quality(load(folder), token_ids, window=600, stride=600)
    assert (quality.num_tokens, quality.perplexity) == (count, pytest.approx(expected, rel=1e-5))


def expected_comparison(model: Tensor, reference: Tensor, targets: Tensor) -> dict[str, float]:
    """Of float64 logits [num_tokens, vocab_size], by the definitions."""
    p, q = reference.softmax(-1), model.softmax(-1)
    divergence = (p * (p.log() - q.log())).sum(-1)
    delta = 100 * (q - p).gather(1, targets[:, None])[:, 0]
    ordered = divergence.sort().values

    def percentile(share: float) -> float:
        low, rest = divmod(share * (len(ordered) - 1), 1)
        return float(ordered[int(low)] * (1 - rest) + ordered[int(low) + 1] * rest)

    return {
        "mean": float(divergence.mean()),
        "p50": percentile(0.5),
        "p99": percentile(0.99),
        "max": float(divergence.max()),
        "top1_agreement": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        "delta_p": float(delta.mean()),
        "delta_p_standard_error": float(delta.std(correction=1)) / math.sqrt(len(delta)),
    }


def test_comparison_with_another_model_is_that_of_its_definitions(
    model: TextModel, folder: Path, other_folder: Path
) -> None:
    quality = measure_quality(model, IDS, reference=load(other_folder), window=203, stride=203)
    logits = [dense_logits(each, IDS)[:-1].double() for each in (folder, other_folder)]
    expected = expected_comparison(*logits, torch.tensor(IDS[1:]))
    assert quality.kl is not None
    for name in ("mean", "p50", "p99", "max"):
        assert getattr(quality.kl, name) == pytest.approx(expected[name], rel=1e-4), name
    assert quality.top1_agreement == expected["top1_agreement"]
    assert quality.delta_p == pytest.approx(expected["delta_p"], rel=1e-4)
    assert quality.delta_p_standard_error == pytest.approx(expected["delta_p_standard_error"], rel=1e-4)
    assert quality.reference_perplexity == pytest.approx(guide_perplexity(load_oracle(other_folder), IDS, 203, 203)[0])


def test_a_model_beside_itself_differs_in_nothing(model: TextModel) -> None:
    quality = measure_quality(model, IDS, reference=model, window=64, stride=24)
    assert quality.kl is not None
    assert (quality.kl.mean, quality.kl.max, quality.top1_agreement) == (0, 0, 1)
    assert (quality.delta_p, quality.delta_p_standard_error) == (0, 0)
    assert quality.reference_perplexity == quality.perplexity


@pytest.mark.parametrize(
    "overrides",
    [{"quantization.method": "int8"}, {"cache.dtype": "fp8_e4m3"}, {"model.dtype": "bfloat16"}],
    ids=lambda overrides: next(iter(overrides)),
)
def test_settings_reach_the_model_and_not_its_reference(
    model: TextModel, folder: Path, overrides: dict[str, str]
) -> None:
    changed, reference = load_pair(
        source(folder), EngineConfig().with_overrides(overrides), (source(folder), EngineConfig())
    )
    quality = measure_quality(changed, IDS, reference=reference, window=64, stride=64)
    assert quality.reference_perplexity == measure_quality(model, IDS, window=64, stride=64).perplexity
    assert quality.kl is not None
    assert 1e-6 < quality.kl.mean < 0.1


def test_a_single_token_has_no_standard_error() -> None:
    quality = summarize(torch.tensor([[-1.0], [-2.0], [0.5], [1.0]]))
    assert (quality.num_tokens, quality.delta_p_standard_error) == (1, None)
    assert quality.delta_p == pytest.approx(100 * (math.exp(-1) - math.exp(-2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1025}, "a window of 1,025 tokens is above the context of .*, 1,024 tokens"),
        ({"window": 1}, "a window of 1 tokens is too short"),
        ({"window": 64, "stride": 65}, "a stride of 65 tokens is impossible; allowed: 1 to the window, 64"),
        ({"stride": 0}, "a stride of 0 tokens is impossible"),
        ({"max_tokens": 1}, "1 tokens are too few to read"),
    ],
)
def test_what_is_refused(model: TextModel, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_quality(model, IDS, **options)


@pytest.mark.parametrize("token_ids", [[], [7]])
def test_a_text_without_a_second_token_is_refused(model: TextModel, token_ids: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"the text has {len(token_ids)} tokens"):
        measure_quality(model, token_ids)


def test_a_reference_with_another_vocabulary_is_refused(model: TextModel, tmp_path: Path) -> None:
    larger = load(make_tiny_llama(tmp_path, vocab_size=600))
    with pytest.raises(ConfigError, match=r"differ in their vocabularies: .* has 512 tokens and .* has 600 tokens"):
        measure_quality(model, IDS, reference=larger)


def test_models_that_do_not_fit_together_are_said_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([2**30, 2**10])
    monkeypatch.setattr("backend.models.loader._free_bytes", lambda device: next(free))
    with pytest.raises(CapacityError, match=r"does not fit beside its reference .*: the weights need"):
        load_pair(source(folder), EngineConfig(), (source(folder), EngineConfig()))


def test_a_model_that_overflows_is_named(folder: Path) -> None:
    broken = load(folder)
    broken.loaded.model.final_norm.weight.data[3] = float("inf")
    with pytest.raises(ModelError, match="its logits are not finite"):
        measure_quality(broken, IDS)


@pytest.mark.slow
def test_the_default_model_on_a_page_of_text(smollm2: ModelSource) -> None:
    """Against the guide's loop, on prose and commands."""
    text = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    token_ids = load_tokenizer(smollm2).encode(text)[:2048]
    assert smollm2.path is not None
    expected, count = guide_perplexity(load_oracle(smollm2.path), token_ids, 1024, 1024)
    quality = measure_quality(load_text_model(smollm2, EngineConfig()), token_ids)
    assert (quality.num_tokens, quality.perplexity) == (count, pytest.approx(expected, rel=1e-4))


@pytest.mark.slow
def test_the_default_model_on_wikitext(smollm2: ModelSource) -> None:
    """In float32 on the beginning of its test set, in windows of 1,024 tokens, none of which is put before the text."""
    name = os.environ.get("SERVELAB_WIKITEXT")
    if not name:
        pytest.skip("SERVELAB_WIKITEXT does not name WikiText-2's test set, a text file that is no part of the project")
    text = Path(name).read_text(encoding="utf-8")[:200_000]
    token_ids = load_tokenizer(smollm2).encode(text)[:8192]
    assert len(token_ids) == 8192
    model = load_text_model(smollm2, EngineConfig().with_overrides({"model.dtype": "float32"}))
    quality = measure_quality(model, token_ids, window=1024, stride=1024)
    assert smollm2.path is not None
    expected, num_tokens = guide_perplexity(load_oracle(smollm2.path), token_ids, 1024, 1024)
    assert quality.num_tokens == num_tokens == 8 * 1023
    assert quality.perplexity == pytest.approx(expected, rel=1e-4)
    assert quality.perplexity == pytest.approx(23.61, abs=0.005)
