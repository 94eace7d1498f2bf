"""transformers itself against the closed forms: parameters counted on the meta device, bytes taken from a cache in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend.analysis.attention_shape import read_attention_shape
from backend.analysis.config_fields import DEFAULTS
from backend.analysis.kv_size import kv_size
from backend.analysis.parameters import read_weights

transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 95,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
QWEN_MOE = MOE | {"shared_expert_intermediate_size": 36}
WINDOW: dict[str, Any] = {"sliding_window": 7}
USED = WINDOW | {"use_sliding_window": True}
GPT: dict[str, Any] = {"vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "eos_token_id": 95}
FALCON: dict[str, Any] = {"num_kv_heads": 2} | BASE
del FALCON["num_key_value_heads"], FALCON["intermediate_size"]  # Falcon has its own names for both

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"} | BASE,
    "llama mha": {"model_type": "llama"} | BASE | {"num_key_value_heads": None},
    "llama mqa": {"model_type": "llama"} | BASE | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama biases": {"model_type": "llama"} | BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"model_type": "mistral"} | BASE | WINDOW | {"head_dim": 12},
    "mistral full": {"model_type": "mistral"} | BASE | {"sliding_window": None},
    "mixtral": {"model_type": "mixtral"} | BASE | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "mixtral window": {"model_type": "mixtral"} | BASE | WINDOW | {"num_local_experts": 4, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"} | BASE | {"tie_word_embeddings": True},
    "qwen2 window": {"model_type": "qwen2"} | BASE | USED | {"max_window_layers": 3},
    "qwen2_moe": {"model_type": "qwen2_moe"} | BASE | QWEN_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 5},
    "qwen2_moe window": {"model_type": "qwen2_moe"}
    | BASE
    | QWEN_MOE
    | USED
    | {"qkv_bias": False, "max_window_layers": 3},
    "qwen3": {"model_type": "qwen3"} | BASE | {"head_dim": 10, "attention_bias": True},
    "qwen3 window": {"model_type": "qwen3"} | BASE | USED | {"head_dim": 8, "max_window_layers": 1},
    "qwen3_moe": {"model_type": "qwen3_moe"} | BASE | MOE | {"head_dim": 10, "mlp_only_layers": [1, 2]},
    "qwen3_moe window": {"model_type": "qwen3_moe"} | BASE | MOE | USED | {"head_dim": 8},
    "gemma": {"model_type": "gemma"} | BASE | {"head_dim": 14, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2"} | BASE | WINDOW | {"head_dim": 14, "attention_bias": True},
    "gemma3": {"model_type": "gemma3_text"} | BASE | WINDOW | {"head_dim": 14, "num_hidden_layers": 7},
    "gemma3 pattern": {"model_type": "gemma3_text"} | BASE | WINDOW | {"head_dim": 14, "sliding_window_pattern": 3},
    "gemma3 listed": {"model_type": "gemma3_text"}
    | BASE
    | WINDOW
    | {"head_dim": 14, "layer_types": ["full_attention", "sliding_attention"] * 2, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2"} | GPT,
    "gpt2 untied": {"model_type": "gpt2"} | GPT | {"n_inner": 100, "tie_word_embeddings": False},
    "falcon mqa": {"model_type": "falcon"} | FALCON,
    "falcon mha": {"model_type": "falcon"}
    | FALCON
    | {"multi_query": False, "parallel_attn": False, "bias": True, "num_kv_heads": 6},
    "falcon new": {"model_type": "falcon"} | FALCON | {"new_decoder_architecture": True, "ffn_hidden_size": 70},
    "falcon new, one norm": {"model_type": "falcon"}
    | FALCON
    | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": True},
    "phi": {"model_type": "phi"} | BASE | {"num_key_value_heads": None},
    "phi norms": {"model_type": "phi"} | BASE | {"qk_layernorm": True},
    "phi3": {"model_type": "phi3"} | BASE,
    "phi3 window": {"model_type": "phi3"} | BASE | WINDOW,
    "deepseek_v2": {"model_type": "deepseek_v2"} | BASE | MLA | {"attention_bias": True, "mlp_bias": True},
    "deepseek_v2 lite": {"model_type": "deepseek_v2"} | BASE | MLA | {"q_lora_rank": None, "tie_word_embeddings": True},
    "deepseek_v3": {"model_type": "deepseek_v3"} | BASE | MLA | {"attention_bias": True, "n_shared_experts": 1},
}


def oracle_config(fields: dict[str, Any]) -> Any:
    rest = {key: value for key, value in fields.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(fields["model_type"], **rest)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_number_of_parameters(fields: dict[str, Any]) -> None:
    config = oracle_config(fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert read_weights(fields).parameters().total == expected
    assert read_weights(config.to_dict()).parameters().total == expected, "as transformers writes the config"


def test_every_family_is_covered() -> None:
    assert {fields["model_type"] for fields in CASES.values()} == DEFAULTS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Falcon's newer architecture is left out: transformers repeats its KV heads for every query head before it caches them.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("falcon new")])
def test_bytes_that_a_decode_step_reads_from_the_cache(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cache hands to attention for the newest token, layer by layer, below the window of 7 and beyond it."""
    fields = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(oracle_config(fields), dtype=dtype).eval()
    kv = kv_size(fields | {"dtype": str(dtype)})
    read: dict[int, int] = {}
    update = transformers.Cache.update

    def recording(self: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        updated = update(self, keys, values, layer, *args, **kwargs)
        read[layer] = sum(tensor.numel() * tensor.element_size() for tensor in updated)
        return updated

    monkeypatch.setattr(transformers.Cache, "update", recording)
    for length in (5, 12):
        prompt = torch.arange(2, 2 + length - 1)[None]
        read.clear()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, min_new_tokens=2, do_sample=False
        )
        assert len(read) == kv.shape.num_layers
        assert sum(read.values()) == kv.request(length).num_bytes
        by_window: dict[int | None, int] = {}
        for layer, window in enumerate(kv.shape.windows):
            by_window[window] = by_window.get(window, 0) + read[layer]
        assert kv.request(length).group_bytes == tuple(by_window[group.window] for group in kv.groups)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_windows_that_transformers_fills_in(fields: dict[str, Any]) -> None:
    config = oracle_config(fields)
    listed = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or None
    if listed is None:
        expected = [window] * config.num_hidden_layers
    else:
        expected = [window if kind == "sliding_attention" else None for kind in listed]
    assert list(read_attention_shape(fields).windows) == expected


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_defaults_of_a_family(family: str) -> None:
    used = {"use_sliding_window": True} if "use_sliding_window" in DEFAULTS[family] else {}
    config = transformers.AutoConfig.for_model(family, **used)
    for name, value in (DEFAULTS[family] | used).items():
        assert getattr(config, name) == value, name
