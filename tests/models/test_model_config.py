"""Reading config.json and generation_config.json, and refusing what the decoder does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ModelError
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import Llama3Scaling, load_decoder_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 72,
    "intermediate_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def write_config(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """LLAMA with `changes`; a value of ... leaves the key out."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_decoder_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_the_shape(tmp_path: Path) -> None:
    config = load_decoder_config(write_config(tmp_path))
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == (
        "LlamaForCausalLM",
        3,
        9,
        3,
    )
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim) == (512, 72, 120, 8)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope_theta) == (1024, 1e-5, 10000.0)
    assert config.rope_scaling is None
    assert config.checkpoint_dtype == "bfloat16"


def test_absent_and_null_keys_take_transformers_defaults(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    absent = {
        "num_key_value_heads": ...,
        "rms_norm_eps": ...,
        "rope_theta": ...,
        "max_position_embeddings": ...,
        "hidden_act": ...,
        "torch_dtype": ...,
    }
    config = load_decoder_config(
        write_config(tmp_path, head_dim=None, rope_scaling=None, sliding_window=None, **absent)
    )
    theirs = LlamaConfig(hidden_size=72, num_attention_heads=9)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.attention_bias == theirs.attention_bias
    assert config.mlp_bias == theirs.mlp_bias
    assert config.checkpoint_dtype == "unknown"


def test_explicit_head_dim_need_not_divide(tmp_path: Path) -> None:
    config = load_decoder_config(write_config(tmp_path, hidden_size=100, head_dim=24))
    assert config.head_dim == 24


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
        {"rope_scaling": LLAMA3_ROPE | {"type": "llama3"}, "rope_theta": 500000.0},
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "rope_theta": ...},
    ],
)
def test_llama3_scaling_in_both_spellings(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = load_decoder_config(write_config(tmp_path, **changes))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 256)


def test_default_rope_parameters(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 250000}
    config = load_decoder_config(write_config(tmp_path, rope_parameters=rope, rope_theta=...))
    assert config.rope_theta == 250000.0
    assert config.rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM", "supported: LlamaForCausalLM"]),
        ({"architectures": ...}, ["names no architecture", "supported: LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "supported: default, llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["'linear'", "supported: default, llama3"]),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": None}}, ["factor is missing"]),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, ["low_freq_factor 4", "high_freq_factor 4"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling 'llama3' is not an object"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "allowed: silu"]),
        ({"sliding_window": 4096}, ["sliding_window"]),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            ["quant_method 'hqq'", "supported: compressed-tensors, awq"],
        ),
        ({"quantization_config": "int4"}, ["quantization_config 'int4' is not an object"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads 9", "num_key_value_heads 4"]),
        ({"hidden_size": 100}, ["hidden_size 100", "num_attention_heads 9"]),
        ({"head_dim": 7}, ["head_dim 7 is odd"]),
        ({"vocab_size": ...}, ["vocab_size is missing"]),
        ({"vocab_size": 0}, ["vocab_size 0"]),
        ({"num_hidden_layers": "3"}, ["num_hidden_layers '3'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers True"]),
        ({"max_position_embeddings": 10**15}, ["max_position_embeddings 1000000000000000", "from 2 to 16,777,216"]),
        ({"max_position_embeddings": 10**30}, ["max_position_embeddings 1000000", "from 2 to 16,777,216"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings 1 ", "from 2 to 16,777,216"]),
        ({"vocab_size": 10**9}, ["vocab_size 1000000000", "from 1 to 4,194,304"]),
        ({"hidden_size": 9 * 10**6}, ["hidden_size 9000000", "from 1 to 262,144"]),
        ({"intermediate_size": 2**40}, ["intermediate_size", "from 1 to 1,048,576"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "from 1 to 1,024"]),
        ({"num_attention_heads": 10**6, "hidden_size": 10**6}, ["from 1 to"]),
        ({"num_key_value_heads": 10**6}, ["num_key_value_heads", "from 1 to 4,096"]),
        ({"head_dim": 10**6}, ["head_dim", "from 1 to 4,096"]),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps 1e+300", "from 1e-20 to 1"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps nan"]),
        ({"rope_theta": 10**400}, ["rope_theta 1000", "from 1 to 1e+12"]),
        ({"rope_theta": 1e-9}, ["rope_theta 1e-09"]),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 1e300}}, ["factor 1e+300"]),
        ({"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 2**30}}, ["original_max_position_emb"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps -1.0"]),
        ({"rope_theta": float("inf")}, ["rope_theta inf"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings 'yes'"]),
    ],
)
def test_refuses_by_name(tmp_path: Path, changes: dict[str, Any], named: list[str]) -> None:
    message = refusal(write_config(tmp_path, **changes))
    assert "config.json" in message
    for part in named:
        assert part in message


def quantized(
    group: dict[str, Any] | None = None, weights: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    """A quantization_config with changes; a value of ... leaves the key out."""
    of_weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 24} | (weights or {})
    one = {"targets": ["Linear"], "weights": of_weights} | (group or {})
    whole = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": one},
        "ignore": ["lm_head"],
    } | config
    return {key: value for key, value in whole.items() if value is not ...}


def test_reads_how_layers_are_stored(tmp_path: Path) -> None:
    by_name = {"targets": ["model.layers.0.mlp.down_proj"], "weights": {"num_bits": 8, "strategy": "channel"}}
    by_pattern = {"targets": ["re:.*mlp"], "weights": {"num_bits": 3, "strategy": "channel", "symmetric": False}}
    groups = quantized()["config_groups"] | {"pattern": by_pattern, "name": by_name}
    config = quantized(config_groups=groups, ignore=["lm_head", "re:.*layers.2.*", "model.layers.1.self_attn.k_proj"])
    stored = load_decoder_config(write_config(tmp_path, quantization_config=config)).stored_quantization
    assert stored is not None
    found = {
        name: scheme and (scheme.bits, scheme.group_size, scheme.symmetric)
        for name in ("0.mlp.down_proj", "1.mlp.down_proj", "1.self_attn.q_proj", "1.self_attn.k_proj", "2.mlp.up_proj")
        for scheme in [stored.scheme_of(f"model.layers.{name}")]
    }
    assert found == {
        "0.mlp.down_proj": (8, -1, True),
        "1.mlp.down_proj": (3, -1, False),
        "1.self_attn.q_proj": (4, 24, True),
        "1.self_attn.k_proj": None,
        "2.mlp.up_proj": None,
    }
    assert stored.scheme_of("lm_head") is None


def test_a_head_that_is_not_left_out_is_stored_as_the_layers_are(tmp_path: Path) -> None:
    stored = load_decoder_config(write_config(tmp_path, quantization_config=quantized(ignore=[]))).stored_quantization
    assert stored is not None
    assert stored.scheme_of("lm_head") == stored.scheme_of("model.layers.0.mlp.down_proj") is not None


_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (quantized(format="marlin-24"), ["'marlin-24'", "pack-quantized, int-quantized, float-quantized"]),
        (quantized(quantization_status="frozen"), ["quantization_status 'frozen'", "compressed"]),
        (quantized(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme is set"]),
        (quantized(sparsity_config={"format": "dense"}), ["sparsity_config is set"]),
        (quantized(transform_config={"config_groups": {"u": {}}}), ["transform_config is set"]),
        (quantized(ignore=["re:("]), ["ignore", "'re:('", "regular expression"]),
        (quantized(config_groups=...), ["config_groups"]),
        (quantized(config_groups={"W4A16": ["Linear"]}), ["W4A16 ['Linear'] is not an object"]),
        (quantized({"targets": "Linear"}), ["targets is not a list"]),
        (quantized({"weights": None}), ["group_0", "nothing of weights"]),
        (quantized({"output_activations": {"num_bits": 8}}), ["output_activations is set"]),
        (quantized({"input_activations": {"num_bits": 8}}), ["input_activations", "pack-quantized"]),
        (quantized(weights={"num_bits": 1}), ["num_bits 1", "from 2 to 8"]),
        (quantized(weights={"type": "float"}), ["'float'", "supported: int"]),
        (quantized(weights={"strategy": "block"}), ["'block'", "group, channel, tensor"]),
        (quantized(weights={"dynamic": True}), ["at run time"]),
        (quantized(weights={"actorder": "group"}), ["actorder 'group'", "weight, static"]),
        (quantized(weights={"group_size": None}), ["group_size is missing"]),
        (quantized(weights={"num_bits": 4}, format="int-quantized"), ["num_bits 4", "from 8 to 8"]),
        (quantized(weights=_FP8, format="float-quantized"), ["without input_activations"]),
        (
            quantized({"input_activations": {"type": "float", "dynamic": False}}, _FP8, format="float-quantized"),
            ["dynamic False", "supported: float8, dynamic"],
        ),
    ],
)
def test_refuses_what_is_stored_otherwise(tmp_path: Path, config: dict[str, Any], named: list[str]) -> None:
    message = refusal(write_config(tmp_path, quantization_config=config))
    assert "config.json" in message
    for part in named:
        assert part in message


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"text"', "\xff\xfe"])
def test_refuses_what_is_not_a_json_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"vocab_size": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"vocab_size": ' + "1" * 5000 + "}", "a number has thousands of digits"),
    ],
    ids=["depth", "digits"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_refuses_json_that_python_cannot_read(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (write_config(tmp_path) / name).write_text(content)
    message = refusal(tmp_path)
    assert f"{name}: not readable as JSON ({reason})" in message


@pytest.mark.parametrize("key", ["vocab_size", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "rope_scaling"])
def test_a_monstrous_value_is_shown_in_part(tmp_path: Path, key: str) -> None:
    values: list[Any] = ["x" * 10**6, list(range(10**5)), [[[[[[[[[[[[1]]]]]]]]]]]]]
    for value in values:
        message = refusal(write_config(tmp_path, None, **{key: value}))
        assert key in message
        assert len(message) < 400


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "union"),
    [
        (2, None, {2}),
        ([2, 5, 7], None, {2, 5, 7}),
        (..., None, set()),
        (None, {"eos_token_id": None}, set()),
        (2, {}, {2}),
        (2, {"eos_token_id": 5}, {2, 5}),
        (2, {"eos_token_id": [5, 7, 2]}, {2, 5, 7}),
        (..., {"eos_token_id": [0, 511]}, {0, 511}),
        ([], {"eos_token_id": 3}, {3}),
    ],
)
def test_eos_ids_are_the_union(tmp_path: Path, in_config: Any, in_generation: Any, union: set[int]) -> None:
    config = load_decoder_config(write_config(tmp_path, in_generation, eos_token_id=in_config))
    assert config.eos_token_ids == union


@pytest.mark.parametrize(
    ("in_config", "in_generation", "named"),
    [
        (512, None, ["config.json: eos_token_id 512", "512 tokens"]),
        ([2, 600], None, ["config.json: eos_token_id 600"]),
        (-1, None, ["eos_token_id -1"]),
        (2, {"eos_token_id": [2, 512]}, ["generation_config.json: eos_token_id 512"]),
        ("</s>", None, ["eos_token_id '</s>'"]),
        ([True], None, ["eos_token_id [True]"]),
    ],
)
def test_refuses_bad_eos_ids(tmp_path: Path, in_config: Any, in_generation: Any, named: list[str]) -> None:
    message = refusal(write_config(tmp_path, in_generation, eos_token_id=in_config))
    for part in named:
        assert part in message


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(tmp_path)


def test_parameter_counts_are_the_published_ones() -> None:
    assert DUMMY_SHAPES["llama-3.1-8b"].count_parameters() == 8_030_261_248
    assert DUMMY_SHAPES["smollm2-135m"].count_parameters() == 134_515_008
