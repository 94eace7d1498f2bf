from __future__ import annotations

from typing import Any

import pytest

from backend.analysis.attention_shape import config_of_decoder
from backend.analysis.parameters import PARTS, PartTotals, read_weights
from backend.models.dummy import DUMMY_SHAPES
from tests.analysis import published
from tests.analysis.arithmetic import evaluate


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (published.LLAMA_3_1_8B, 8_030_261_248),
        (published.LLAMA_3_1_70B, 70_553_706_496),
        (published.SMOLLM2_135M, 134_515_008),
        (published.QWEN_2_5_0_5B, 494_032_768),
        (published.QWEN_3_0_6B, 596_049_920),
        (published.QWEN_3_30B_A3B, 30_532_122_624),
        (published.MISTRAL_7B_V0_1, 7_241_732_096),
        (published.MIXTRAL_8X7B, 46_702_792_704),
        (published.GPT2, 124_439_808),
        (published.GEMMA_2_2B, 2_614_341_888),
        (published.FALCON_7B, 6_921_720_704),
        (published.PHI_2, 2_779_683_840),
        (published.DEEPSEEK_V2_LITE, 15_706_484_224),
        # As published, less the 58 × 256 expert biases, which are buffers.
        (published.DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_models(config: dict[str, Any], num_parameters: int) -> None:
    weights = read_weights(config)
    totals = weights.parameters()
    assert totals.total == num_parameters
    assert_lines_add_up(totals)
    assert weights.num_bytes("float16").total == 2 * num_parameters
    assert weights.num_bytes("float32").total == 4 * num_parameters


@pytest.mark.parametrize("name", sorted(DUMMY_SHAPES))
def test_the_engines_own_models(name: str) -> None:
    decoder = DUMMY_SHAPES[name]
    assert read_weights(config_of_decoder(decoder)).parameters().total == decoder.count_parameters()


def test_parts_of_llama_3_1_8b() -> None:
    totals = read_weights(published.LLAMA_3_1_8B).parameters()
    assert totals.embedding == totals.head == 128256 * 4096
    assert totals.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert totals.mlp == 32 * 3 * 4096 * 14336
    assert totals.norms == 65 * 4096


def test_a_tied_head_counts_with_the_embedding() -> None:
    config = published.SMOLLM2_135M
    tied, untied = read_weights(config).parameters(), read_weights(config | {"tie_word_embeddings": False}).parameters()
    assert (tied.head, untied.head) == (0, 49152 * 576)
    assert untied.total - tied.total == 49152 * 576


def test_quantized_weights_are_the_linear_layers_with_their_scales() -> None:
    """SmolLM2-135M by hand. Rows a layer: query 576, key and value 192 each, output 576, gate and up 1,536 each, down 576."""
    weights = read_weights(published.SMOLLM2_135M)
    rest = 2 * (49152 * 576 + 61 * 576)
    of_576, of_1536 = 576 + 192 + 192 + 576 + 2 * 1536, 576
    int8 = 30 * (of_576 * (576 + 2) + of_1536 * (1536 + 2))
    assert weights.num_bytes("int8").total == weights.num_bytes("fp8_e4m3").total == rest + int8
    # Groups of 64 divide both widths; of 128, the last of the five in 576 is half full.
    assert weights.num_bytes("int4", group_size=64).total == rest + 30 * (
        of_576 * (288 + 9 * 4) + of_1536 * (768 + 24 * 4)
    )
    assert weights.num_bytes("int4").total == rest + 30 * (of_576 * (288 + 5 * 4) + of_1536 * (768 + 12 * 4))


def test_quantized_scales_follow_a_matrix_own_rows() -> None:
    """Heads that do not add up to the hidden size: query [256, 64], key and value [32, 64] each, output [64, 256]."""
    config = published.QWEN_3_0_6B | {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    attention = read_weights(config).num_bytes("int8").attention
    assert attention == (256 + 32 + 32) * (64 + 2) + 64 * (256 + 2)


def test_auto_is_the_checkpoints_dtype_and_bfloat16_where_it_names_none() -> None:
    gemma, gpt2 = read_weights(published.GEMMA_2_2B), read_weights(published.GPT2)
    assert gemma.num_bytes().total == 4 * gemma.parameters().total
    assert gpt2.num_bytes().total == 2 * gpt2.parameters().total


@pytest.mark.parametrize(
    ("config", "changes", "num_moe"),
    [
        (published.QWEN_3_30B_A3B, {"mlp_only_layers": [0, 7, 99, 7]}, 46),
        (published.QWEN_3_30B_A3B, {"decoder_sparse_step": 3}, 16),  # layers 2, 5, ..., 47
        (published.QWEN_3_30B_A3B, {"decoder_sparse_step": 3, "mlp_only_layers": [1, 2, 5]}, 14),
        (published.QWEN_3_30B_A3B, {"decoder_sparse_step": 49}, 0),
        (published.DEEPSEEK_V3, {"first_k_dense_replace": 0}, 61),
        (published.DEEPSEEK_V3, {"first_k_dense_replace": 70}, 0),
    ],
)
def test_which_layers_have_experts(config: dict[str, Any], changes: dict[str, Any], num_moe: int) -> None:
    routers = [tensor.count for tensor in read_weights(config | changes).tensors if tensor.name == "router"]
    assert routers == ([num_moe] if num_moe else [])


def test_what_a_checkpoint_holds_beside_the_decoder_is_named() -> None:
    assert read_weights(published.LLAMA_3_1_8B).not_counted == ()
    assert read_weights(published.GEMMA_3_4B).not_counted == ("the vision tower and its projector",)
    assert read_weights(published.DEEPSEEK_V3).not_counted == ("the layers that predict further tokens",)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"model_type 'mamba9' .* llama, mistral,"):
        read_weights(published.LLAMA_3_1_8B | {"model_type": "mamba9"})
    with pytest.raises(ValueError, match="vocab_size is missing"):
        read_weights(published.LLAMA_3_1_8B | {"vocab_size": None})
    with pytest.raises(ValueError, match="moe_intermediate_size is missing"):
        read_weights(published.QWEN_3_30B_A3B | {"moe_intermediate_size": None})
    with pytest.raises(ValueError, match="mlp_only_layers 3 is not a list of int"):
        read_weights(published.QWEN_3_30B_A3B | {"mlp_only_layers": 3})
    wrong: Any = "int3"
    with pytest.raises(ValueError, match="'int3' is not one of auto, "):
        read_weights(published.GPT2).num_bytes(wrong)
    with pytest.raises(ValueError, match="group_size 0"):
        read_weights(published.GPT2).num_bytes("int4", group_size=0)


def assert_lines_add_up(totals: PartTotals) -> None:
    shown = {}
    for line in totals.arithmetic:
        part, equation = line.split(": ")
        values = evaluate(equation)
        assert len(set(values)) == 1, line
        shown[part] = values[0]
    assert shown.pop("total") == totals.total
    assert shown == {part: getattr(totals, part) for part in PARTS if getattr(totals, part)}
