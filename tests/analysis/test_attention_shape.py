from __future__ import annotations

from typing import Any

import pytest

from backend.analysis.attention_shape import config_of_decoder, read_attention_shape
from backend.models.dummy import DUMMY_SHAPES
from tests.analysis import published

LLAMA = published.LLAMA_3_1_8B


def windows(config: dict[str, Any]) -> list[int | None]:
    return list(read_attention_shape(config).windows)


def test_mistral_has_its_window_in_every_layer_unless_it_is_null() -> None:
    config = published.MISTRAL_7B_V0_1
    assert windows(config) == [4096] * 32
    assert windows(config | {"sliding_window": None}) == [None] * 32
    without = {key: value for key, value in config.items() if key != "sliding_window"}
    assert windows(without) == [4096] * 32


def test_qwen_has_windows_only_where_they_are_in_use_and_from_the_layer_that_it_names() -> None:
    config = published.QWEN_2_5_0_5B | {"max_window_layers": 20}
    assert windows(config) == [None] * 24
    assert windows(config | {"use_sliding_window": True}) == [None] * 20 + [32768] * 4


def test_gemma_alternates_by_pattern_or_as_listed() -> None:
    assert windows(published.GEMMA_2_2B) == [4096, None] * 13
    gemma_3 = published.GEMMA_3_4B["text_config"] | {"num_hidden_layers": 6, "sliding_window": 512}
    assert windows(gemma_3) == [512] * 5 + [None]
    assert windows(gemma_3 | {"sliding_window_pattern": 3}) == [512, 512, None] * 2
    listed = ["full_attention"] * 2 + ["sliding_attention"] * 4
    assert windows(gemma_3 | {"layer_types": listed, "sliding_window_pattern": 3}) == [None] * 2 + [512] * 4


def test_a_family_that_is_not_known_is_read_by_the_usual_names() -> None:
    shape = read_attention_shape(
        {"model_type": "new", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_head_kv": 2, "n_ctx": 100}
    )
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 2, 16)
    assert (shape.kind, shape.max_position_embeddings, shape.windows) == ("GQA", 100, (None, None))


def test_the_inner_config_counts_and_the_outer_dtype_is_the_models() -> None:
    nested = {
        "model_type": "llava",
        "hidden_size": 1,
        "dtype": "float16",
        "text_config": LLAMA | {"torch_dtype": "float32"},
    }
    shape = read_attention_shape(nested)
    assert (shape.hidden_size, shape.model_type, shape.checkpoint_dtype) == (4096, "llama", "float16")


@pytest.mark.parametrize("name", sorted(DUMMY_SHAPES))
def test_the_engines_own_models(name: str) -> None:
    decoder = DUMMY_SHAPES[name]
    shape = read_attention_shape(config_of_decoder(decoder))
    for field in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"):
        assert getattr(shape, field) == getattr(decoder, field)
    assert shape.checkpoint_dtype is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "a model config is a JSON object, not list"),
        ({}, "model_type is missing"),
        ({"model_type": "llama"}, r"hidden_size is missing .*n_embd"),
        ({"model_type": 3}, "model_type 3 is not a string"),
        ({"model_type": "x", "text_config": 3}, "text_config 3 is not an object"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers 0 is not an integer from 1 to 4,096"),
        (LLAMA | {"num_hidden_layers": 4097}, "num_hidden_layers 4097 is not an integer from 1 to 4,096"),
        (LLAMA | {"hidden_size": 2**24 + 1}, "hidden_size 16777217 is not an integer from 1 to 16,777,216"),
        (LLAMA | {"hidden_size": True}, "hidden_size True is not an integer"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size '4096' is not an integer"),
        (LLAMA | {"hidden_size": 4100}, "hidden_size 4100 is not a multiple of num_attention_heads 32"),
        (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        (LLAMA | {"torch_dtype": 16}, "dtype 16 is not a string"),
        (LLAMA | {"sliding_window": 512}, "layer_types is missing: which layers of llama"),
        (
            LLAMA | {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, not one for each of num_hidden_layers 32",
        ),
        (
            LLAMA | {"layer_types": ["linear_attention"] * 32},
            "layer_types names 'linear_attention'; supported: full_attention",
        ),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        (LLAMA | {"layer_types": 3}, "layer_types 3 is not a list of str"),
        (LLAMA | {"num_kv_shared_layers": 4}, "num_kv_shared_layers is set"),
        (LLAMA | {"model_type": "new", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        (LLAMA | {"v_head_dim": 64}, "v_head_dim is set without kv_lora_rank"),
        (LLAMA | {"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        (published.FALCON_7B | {"multi_query": "yes"}, "multi_query 'yes' is neither true nor false"),
        (published.QWEN_2_5_0_5B | {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers -1"),
    ],
)
def test_errors_name_the_field_and_what_it_may_be(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_attention_shape(config)
