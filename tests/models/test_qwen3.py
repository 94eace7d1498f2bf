"""Models that normalise each head's queries and keys before they are rotated, against transformers' Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.analysis.attention_shape import config_of_decoder
from backend.analysis.parameters import read_weights
from backend.attention.reference import ReferenceAttention
from backend.config import QuantizationSettings
from backend.errors import ModelError
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.decoder import Decoder
from backend.models.dummy import DUMMY_SHAPES
from backend.models.loader import NOT_QUANTIZED, LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.models.weight_slots import weight_slots
from backend.spec_decode.heads.eagle import EagleHead
from backend.worker.decoders import ReferenceDecoder
from tests.analysis import published
from tests.helpers import assert_greedy, dense_greedy, dense_logits, make_tiny_model, paged_logits
from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.attention.triton import TritonAttention  # noqa: E402
from backend.models.triton_decoder import TritonDecoder  # noqa: E402
from tests.models.test_triton_decoder import Run  # noqa: E402

CPU = torch.device("cpu")
# Heads of 12, where the hidden size gives each of the 9 only 8, and of 24.
CONFIGS: dict[str, dict[str, Any]] = {
    "head_dim above": {"head_dim": 12},
    "tied": {
        "head_dim": 24,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "head_dim below, biases": {"head_dim": 4, "attention_bias": True},
    "no gqa": {"head_dim": 12, "num_key_value_heads": 9},
    "eps that matters": {"head_dim": 12, "rms_norm_eps": 0.5},
    "sharded": {"head_dim": 12, "max_shard_size": "100KB"},
}
HEADS: dict[str, Any] = {"head_dim": 12}


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    quantization: QuantizationSettings = NOT_QUANTIZED,
) -> LoadedModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_model(source, device=device, dtype=dtype, quantization=quantization)


def random_ids(num_tokens: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 512, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "Qwen3", **HEADS)


def edit_tensors(folder: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy with other tensors, names with `__` for a dot; None removes one."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, "Qwen3", **CONFIGS[name])
    loaded = load(folder)
    assert loaded.notices == ()
    assert loaded.config.qk_norm
    assert loaded.config.head_dim != loaded.config.hidden_size // loaded.config.num_heads
    token_ids = random_ids(77)
    expected = dense_logits(folder, token_ids)
    for chunk_sizes in (None, [30, 1, 1, 5, 40]):
        logits = paged_logits(loaded.model, token_ids, chunk_sizes=chunk_sizes, block_size=4)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_greedy_continuation_is_transformers_own(tiny: Path) -> None:
    loaded, prompt, chosen = load(tiny), random_ids(20), []
    for _ in range(16):
        logits = paged_logits(loaded.model, prompt + chosen, chunk_sizes=[20] + [1] * len(chosen))
        chosen.append(int(logits[-1].argmax()))
    assert_greedy(tiny, prompt, chosen)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_greedy_continuation_by_the_kernels_is_transformers_own(
    tmp_path: Path, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two pieces, then token by token; in the caches stand the same keys and values as by the references."""
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)  # weights as a GPU has them
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 6,
    }
    folder = make_tiny_model(tmp_path, "Qwen3", **small, num_key_value_heads=2, head_dim=16)
    model, prompt, num_tokens = load(folder, device=device).model, random_ids(9), 5
    ours = Run(model, TritonDecoder(model, batch_invariant=batch_invariant), TritonAttention(batch_invariant), 1)
    reference = Run(model, ReferenceDecoder(model), ReferenceAttention(), 1)
    found = []
    for run in (ours, reference):
        run.step({0: prompt[:6]})
        logits, chosen = [run.step({0: prompt[6:]})[-1]], list[int]()
        for _ in range(num_tokens):
            chosen.append(int(logits[-1].argmax()))
            logits += run.step({0: chosen[-1:]})
        assert chosen == dense_greedy(folder, prompt, num_tokens)
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0][:-1].cpu(), dense_logits(folder, prompt + chosen)[8:-1], atol=1e-3, rtol=0)
    for mine, wanted in zip(ours.caches, reference.caches, strict=True):
        torch.testing.assert_close(mine.key_cache, wanted.key_cache, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.value_cache, wanted.value_cache, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_each_norm_of_each_layer_counts(tiny: Path, tmp_path: Path, norm: str) -> None:
    """transformers agrees with a checkpoint where one of them is another, and not with the one that it was made of."""
    weight = torch.rand(12, generator=torch.Generator().manual_seed(2)) + 0.5
    edited = edit_tensors(tiny, tmp_path / "edited", **{f"model__layers__1__self_attn__{norm}__weight": weight})
    token_ids = random_ids(40)
    logits = paged_logits(load(edited).model, token_ids)
    torch.testing.assert_close(logits, dense_logits(edited, token_ids), atol=1e-4, rtol=0)
    assert (logits - dense_logits(tiny, token_ids)).abs().max() > 0.1


def test_a_missing_norm_is_named(tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_norm.weight"
    folder = edit_tensors(tiny, tmp_path / "edited", **{name.replace(".", "__"): None})
    with pytest.raises(ModelError, match=f"lacks {name}"):
        load(folder)


def test_a_norm_of_all_heads_at_once_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Some architectures normalise the projection as a whole, under the same names."""
    wide = {"model__layers__0__self_attn__q_norm__weight": torch.ones(108)}
    with pytest.raises(ModelError, match=r"q_norm.weight has shape \[108\], and config.json asks for \[12\]"):
        load(edit_tensors(tiny, tmp_path / "edited", **wide))


@pytest.mark.parametrize("name", ["tied", "head_dim below, biases"])
def test_parameters_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, "Qwen3", **CONFIGS[name])
    config = load(folder).config
    num_stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert config.count_parameters() == num_stored
    assert read_weights(config_of_decoder(config)).parameters().total == num_stored
    assert read_weights(json.loads((folder / "config.json").read_text())).parameters().total == num_stored
    decoder = Decoder(config, dtype=torch.float32, device=CPU)
    for parameter in decoder.parameters():
        parameter.zero_()
    for slot in weight_slots(decoder).values():
        slot += 1
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in decoder.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(tiny: Path, dtype: torch.dtype) -> None:
    token_ids = random_ids(50)
    difference = (paged_logits(load(tiny, dtype).model, token_ids) - dense_logits(tiny, token_ids)).abs()
    assert difference.mean() < (0.06 if dtype == torch.bfloat16 else 0.01)  # the logits' spread is 3


@pytest.mark.parametrize(
    "settings",
    [
        QuantizationSettings(method="int8"),
        QuantizationSettings(method="int4", group_size=-1),
        QuantizationSettings(method="nf4", group_size=-1),
    ],
    ids=lambda settings: settings.method,
)
def test_quantized_while_it_is_loaded(
    tiny: Path, settings: QuantizationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes what transformers does of the dequantized weights; norms are none of what is quantized."""
    loaded, token_ids = load(tiny, quantization=settings), random_ids(30)
    assert loaded.num_quantized_layers == 3 * 4
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)  # weights that can be written
    whole = load(tiny).model
    for name, parameter in whole.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(loaded.model.get_parameter(name), parameter)
    for name, module in loaded.model.named_modules():
        if isinstance(module, QuantizedLinear):
            whole.get_parameter(f"{name}.weight").copy_(module.packed.dequantize())
    logits = paged_logits(loaded.model, token_ids)
    torch.testing.assert_close(logits, paged_logits(whole, token_ids), atol=1e-4, rtol=0)
    assert 0 < (logits - dense_logits(tiny, token_ids)).abs().mean() < 1


def test_a_heads_layer_has_norms_as_the_targets(tiny: Path) -> None:
    config = load(tiny).config
    head = EagleHead(config, 3, dtype=torch.float32, device=CPU)
    head.initialize(torch.ones(config.hidden_size), torch.Generator().manual_seed(0))
    norms = head.layer.attention.q_norm, head.layer.attention.k_norm
    assert all(norm is not None and torch.equal(norm.weight, torch.ones(12)) for norm in norms)


def test_the_dummy_is_the_published_shape() -> None:
    dummy, config = DUMMY_SHAPES["qwen3-0.6b"], published.QWEN_3_0_6B
    assert (
        config_of_decoder(dummy).items()
        >= {name: value for name, value in config.items() if name not in ("max_window_layers", "torch_dtype")}.items()
    )
    assert dummy.count_parameters() == 596_049_920
