from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.analysis.attention_shape import config_of_decoder
from backend.analysis.kv_size import KVLayerGroup, kv_size, misquoted_llama_3_8b
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_format import KV_FORMATS, PLAIN
from backend.models.dummy import DUMMY_SHAPES
from tests.analysis import published
from tests.analysis.arithmetic import evaluate

GIB = 2**30
K128 = 131_072


def test_llama_3_8b_is_128_kib_a_token_and_16_gib_at_128k() -> None:
    kv = kv_size(published.LLAMA_3_1_8B)
    assert kv.bytes_per_token == 131_072
    assert kv.request(K128).num_bytes == 16 * GIB
    assert kv.arithmetic == "2 × 32 layers × 8 KV heads × 128 × 2 bytes = 131,072"
    assert kv.request(K128).arithmetic == "131,072 tokens × 131,072 bytes = 17,179,869,184 bytes (16.00 GiB)"


def test_llama_3_1_70b_is_320_kib_a_token_and_40_gib_at_128k() -> None:
    kv = kv_size(published.LLAMA_3_1_70B)
    assert (kv.bytes_per_token, kv.request(K128).num_bytes) == (327_680, 40 * GIB)


def test_a_70b_without_gqa_takes_80_gib_at_32k() -> None:
    kv = kv_size(published.LLAMA_3_1_70B | {"num_key_value_heads": None})
    assert kv.shape.kind == "MHA"
    assert kv.request(32_768).num_bytes == 80 * GIB


def test_the_misquoted_figure_is_the_70bs_depth_with_every_query_head() -> None:
    text = misquoted_llama_3_8b()
    right, wrong, why = text.splitlines()
    assert "= 131,072 bytes a token" in right
    assert "16.00 GiB" in right
    assert "2 × 80 layers × 64 KV heads × 128 × 2 bytes = 2,621,440" in wrong
    assert "320.00 GiB" in wrong
    assert why.endswith("80/32 layers × 64/8 KV heads = 2.5 × 8 = 20 times too much")
    assert 2 * 80 * 64 * 128 * 2 == 2_621_440 == 20 * 131_072 == 2.5 * 2**20


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [
        ("float32", 2 * 32 * 8 * 128 * 4),
        ("bfloat16", 2 * 32 * 8 * 128 * 2),
        ("float16", 2 * 32 * 8 * 128 * 2),
        ("fp8_e4m3", 2 * 32 * 8 * (128 + 2)),
        ("int8", 2 * 32 * 8 * (128 + 2)),
        ("int4", 2 * 32 * 8 * (64 + 2 + 2)),
    ],
)
def test_element_types_and_their_scales(dtype: Any, bytes_per_token: int) -> None:
    kv = kv_size(published.LLAMA_3_1_8B, dtype)
    assert kv.bytes_per_token == bytes_per_token
    assert set(evaluate(kv.arithmetic)) == {bytes_per_token}


@pytest.mark.parametrize(
    ("named", "resolved"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
    ],
)
def test_auto_is_the_checkpoints_dtype_and_bfloat16_where_it_names_none(named: dict[str, Any], resolved: str) -> None:
    assert kv_size(published.LLAMA_3_1_8B | named).dtype == resolved


@pytest.mark.parametrize(
    ("config", "kind", "values_per_token_and_layer"),
    [
        (published.GPT2, "MHA", 2 * 768),
        (published.PHI_2, "MHA", 2 * 2560),
        (published.QWEN_2_5_0_5B, "GQA", 2 * 2 * 64),
        (published.QWEN_3_0_6B, "GQA", 2 * 8 * 128),
        (published.FALCON_7B, "MQA", 2 * 64),
        (published.FALCON_40B, "GQA", 2 * 8 * 64),
        (published.DEEPSEEK_V3, "MLA", 576),
        (published.DEEPSEEK_V2_LITE, "MLA", 576),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_values_that_a_layer_keeps_of_a_token(
    config: dict[str, Any], kind: str, values_per_token_and_layer: int
) -> None:
    shape = kv_size(config).shape
    assert (shape.kind, shape.values_per_token_and_layer) == (kind, values_per_token_and_layer)


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [("auto", 61 * 576 * 2), ("fp8_e4m3", 61 * (576 + 2 * 2)), ("int4", 61 * (288 + 2 * 4))],
)
def test_mla_keeps_one_latent_and_one_rotated_key(dtype: Any, bytes_per_token: int) -> None:
    kv = kv_size(published.DEEPSEEK_V3, dtype)
    assert kv.bytes_per_token == bytes_per_token
    assert set(evaluate(kv.arithmetic)) == {bytes_per_token}


def test_window_layers_stop_growing_and_full_ones_do_not() -> None:
    """Gemma 3 4B: layers 6, 12, 18, 24 and 30 of 34 are full, the others keep 1,024 tokens; 4 KV heads of 256."""
    kv = kv_size(published.GEMMA_3_4B)
    per_layer = 2 * 4 * 256 * 2
    assert [(group.num_layers, group.window) for group in kv.groups] == [(5, None), (29, 1024)]
    assert kv.bytes_per_token == 34 * per_layer
    assert kv.request(1000).num_bytes == 1000 * 34 * per_layer
    assert kv.request(1024).num_bytes == 1024 * 34 * per_layer
    long = kv.request(K128)
    assert long.group_bytes == (K128 * 5 * per_layer, 1024 * 29 * per_layer)
    assert long.num_bytes == 2_805_989_376
    assert set(evaluate(long.arithmetic.removesuffix(" bytes (2.61 GiB)"))) == {2_805_989_376}


def test_a_model_of_windows_alone_takes_the_same_at_any_length_beyond() -> None:
    kv = kv_size(published.MISTRAL_7B_V0_1)
    assert kv.request(4096).num_bytes == kv.request(32_768).num_bytes == 4096 * 131_072


@pytest.mark.parametrize("name", sorted(DUMMY_SHAPES))
def test_the_engines_own_models_have_the_size_that_the_engine_gives_their_blocks(name: str) -> None:
    decoder = DUMMY_SHAPES[name]
    for kv_format in KV_FORMATS.values():
        kv = kv_size(config_of_decoder(decoder), "float16" if kv_format is PLAIN else kv_format.name)  # type: ignore[arg-type]
        group = KVGroupSpec(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, dtype_bytes=2, format=kv_format)
        assert kv.bytes_per_token == group.bytes_per_token
        assert kv.shape.windows == decoder.windows
        num_groups = len(set(decoder.windows))  # of equally many layers, in all of them
        assert kv.blocks(16).bytes_per_block == 16 * group.bytes_per_token // num_groups
        assert kv.blocks(16).group_block_bytes == (kv.blocks(16).bytes_per_block,) * num_groups


def blocks_in_reach(window: int | None, num_tokens: int, block_size: int) -> int:
    """Blocks with a token that the newest one attends to, itself included."""
    first = 0 if window is None else max(0, num_tokens - window)
    return len({position // block_size for position in range(first, num_tokens)})


@given(
    window=st.none() | st.integers(1, 40),
    num_tokens=st.integers(1, 120),
    block_size=st.integers(1, 17),
)
def test_blocks_of_a_request_against_counting_them(window: int | None, num_tokens: int, block_size: int) -> None:
    group = KVLayerGroup(1, window, 1, "")
    held = [blocks_in_reach(window, length, block_size) for length in range(1, num_tokens + 1)]
    assert group.peak_blocks(num_tokens, block_size) == max(held)


@given(window=st.none() | st.integers(1, 40), block_size=st.integers(1, 17))
def test_the_bound_on_internal_waste_is_reached_and_not_passed(window: int | None, block_size: int) -> None:
    group = KVLayerGroup(1, window, 1, "")
    unused = [
        blocks_in_reach(window, length, block_size) * block_size - group.tokens_held(length) for length in range(1, 150)
    ]
    assert group.most_unused_slots(block_size) == max(unused)


def test_blocks_of_a_model_with_windows() -> None:
    """A window of 1,024 that does not begin at a block's start lies in 65 blocks of 16.

    5 full layers and 29 with a window are one and six times 5, one of which there is not.
    """
    blocks = kv_size(published.GEMMA_3_4B).blocks(16)
    per_layer = 2 * 4 * 256 * 2
    assert blocks.request_blocks(K128) == (8192, 65)
    assert blocks.bytes_per_block == 5 * 16 * per_layer
    assert blocks.request_bytes(K128) == (8192 + 65 * 6) * blocks.bytes_per_block
    assert blocks.most_wasted_bytes == (15 * 5 + 16 * 29) * per_layer
    assert evaluate(blocks.arithmetic) == [blocks.bytes_per_block] * 2


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_lengths_and_block_sizes_are_positive_integers(value: Any) -> None:
    kv = kv_size(published.LLAMA_3_1_8B)
    with pytest.raises(ValueError, match="num_tokens"):
        kv.request(value)
    with pytest.raises(ValueError, match="block_size"):
        kv.blocks(value)


def test_dtypes_that_cannot_be() -> None:
    wrong: Any = "int2"
    with pytest.raises(ValueError, match=r"'int2' is not one of auto, float32, .*int4"):
        kv_size(published.LLAMA_3_1_8B, wrong)
    with pytest.raises(ValueError, match="'float8_e4m3fn' of the config"):
        kv_size(published.LLAMA_3_1_8B | {"torch_dtype": "float8_e4m3fn"})
    with pytest.raises(ValueError, match="33 values"):
        kv_size(published.LLAMA_3_1_8B | {"head_dim": 33}, "int4")
