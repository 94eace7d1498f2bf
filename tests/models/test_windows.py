"""Which layers have a window, as transformers reads the config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.analysis.attention_shape import config_of_decoder, read_attention_shape
from backend.errors import ModelError
from backend.models.loader import load_model
from backend.models.model_config import load_decoder_config
from backend.models.sources import ModelSource
from tests.helpers import dense_logits, make_tiny_model, paged_logits
from tests.models.test_model_config import LLAMA

MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 4}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
CPU = torch.device("cpu")
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def write(folder: Path, config: dict[str, Any]) -> Path:
    """A value of ... leaves the key out."""
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def windows_of_transformers(folder: Path) -> tuple[int | None, ...]:
    """Those that its attention layers pass on and its model makes masks of."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    layers = [layer.self_attn for layer in model.model.layers]
    return tuple(getattr(layer, "sliding_window", layer.config.sliding_window) for layer in layers)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MISTRAL, id="mistral, left out"),
        pytest.param(MISTRAL | {"sliding_window": None}, id="mistral, null"),
        pytest.param(MISTRAL | {"sliding_window": 24}, id="mistral"),
        pytest.param(MISTRAL | {"sliding_window": 24, "use_sliding_window": False}, id="mistral, a flag it has not"),
        pytest.param(QWEN2, id="qwen2, left out"),
        pytest.param(QWEN2 | {"sliding_window": 24}, id="qwen2, switched off"),
        pytest.param(QWEN2 | {"sliding_window": 24, "use_sliding_window": True}, id="qwen2, from layer 28"),
        *[
            pytest.param(
                QWEN2 | {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": first},
                id=f"qwen2, from layer {first}",
            )
            for first in (0, 1, 3, 4, 9)
        ],
        pytest.param(
            QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}, id="qwen2, window of the default size"
        ),
        pytest.param(
            QWEN2 | {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 2}, id="qwen2, null"
        ),
        pytest.param(
            QWEN2 | {"sliding_window": 24, "use_sliding_window": True, "layer_types": MIXED}, id="qwen2, by layer"
        ),
        pytest.param(
            QWEN2 | {"sliding_window": 24, "layer_types": ["full_attention"] * 4}, id="qwen2, by layer, all full"
        ),
        pytest.param(QWEN3 | {"sliding_window": 24}, id="qwen3, switched off"),
        pytest.param(
            QWEN3 | {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 3}, id="qwen3, from layer 3"
        ),
        pytest.param(
            QWEN3 | {"sliding_window": 24, "use_sliding_window": True, "layer_types": MIXED}, id="qwen3, by layer"
        ),
    ],
)
def test_windows_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write(tmp_path, config)
    decoder, expected = load_decoder_config(folder), windows_of_transformers(folder)
    assert decoder.windows == expected
    assert read_attention_shape(config).windows == expected
    assert read_attention_shape(config_of_decoder(decoder)).windows == expected


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {"sliding_window": 20}),
        ("Qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 12, "sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    """And are not those of a window that is one token wider or narrower."""
    folder = make_tiny_model(tmp_path, architecture, **changes)
    loaded = load_model(ModelSource(str(folder), "folder", path=folder), device=CPU, dtype=torch.float32)
    assert loaded.notices == ()
    assert loaded.num_parameters == loaded.config.count_parameters()
    token_ids = torch.randint(0, 512, (77,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = dense_logits(folder, token_ids)
    for chunk_sizes in (None, [30, 1, 1, 5, 40]):
        logits = paged_logits(loaded.model, token_ids, chunk_sizes=chunk_sizes, block_size=4)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    for other in (19, 21) if loaded.config.sliding_window else ():
        loaded.model.config = replace(loaded.config, sliding_window=other)
        assert (paged_logits(loaded.model, token_ids, block_size=4) - expected).abs().max() > 0.1


@pytest.mark.parametrize("config", [MISTRAL, QWEN2, QWEN3])
def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    left_out = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "num_key_value_heads", "attention_bias")
    absent: dict[str, Any] = dict.fromkeys((*left_out, "head_dim"), ...)
    heads = {"num_attention_heads": 64, "hidden_size": 512}
    folder = write(tmp_path, config | absent | heads)
    ours, theirs = load_decoder_config(folder), AutoConfig.from_pretrained(folder)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 64)
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    write(tmp_path, config | absent | heads | {"num_key_value_heads": None})
    assert load_decoder_config(folder).num_kv_heads == 64
    if config is not MISTRAL:  # of which transformers refuses it
        assert AutoConfig.from_pretrained(folder).num_key_value_heads == 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"sliding_window": 24}, "sliding_window is set, and attention windows of LlamaForCausalLM are not"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window 0 is not an integer from 1"),
        (MISTRAL | {"sliding_window": True}, "sliding_window True"),
        (MISTRAL | {"layer_types": MIXED}, "layer_types is set, and layers of two kinds in a MistralForCausalLM"),
        (QWEN2 | {"use_sliding_window": 1}, "use_sliding_window 1 is neither true nor false"),
        (QWEN2 | {"layer_types": MIXED}, "layer_types names sliding_attention, but sliding_window is null or use_"),
        (QWEN2 | {"layer_types": MIXED[:3]}, "is not a list of 4 names, one for each layer"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'; supported: full_attention, sliding"),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers -1 is not an integer from 0",
        ),
        (QWEN3 | {"layer_types": MIXED}, "layer_types names sliding_attention, but sliding_window is null or use_"),
        (
            QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"]},
            "'Qwen3MoeForCausalLM' is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_decoder_config(write(tmp_path, config))
    assert message in str(caught.value)
