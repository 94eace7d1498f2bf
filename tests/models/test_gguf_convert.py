"""GGUF conversion against what the file was written from, and against transformers on both sides of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from backend.errors import ModelError
from backend.models.gguf_convert import convert_gguf
from backend.models.model_config import load_decoder_config
from backend.models.sources import ModelSource
from tests.models.tiny_gguf import HEAD_DIM, LAYERS, TinyGGUF, convert, tiny_gguf

TYPE = gguf.GGMLQuantizationType


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits[0]


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_what_was_written(tmp_path: Path, tied: bool) -> None:
    tiny = tiny_gguf(tied=tied)
    found = load_file(convert(tiny, tmp_path) / "model.safetensors")
    assert found.keys() == tiny.weights.keys()
    for name, weight in tiny.weights.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_gives_the_logits_of_the_weights(tmp_path: Path, tied: bool) -> None:
    """A model of transformers, filled by hand with the unpermuted weights, against the folder loaded by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = tiny_gguf(tied=tied)
    config = LlamaConfig(
        vocab_size=len(tiny.tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(weight) for name, weight in tiny.weights.items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    with torch.inference_mode():
        expected = model(torch.arange(3, 40)[None]).logits[0]
    torch.testing.assert_close(logits_of(convert(tiny, tmp_path)), expected, rtol=0, atol=1e-5)


def test_transformers_reads_the_same_model_from_the_gguf_file(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tiny = tiny_gguf(tied=False)
    folder = convert(tiny, tmp_path)
    path = str(tmp_path / "tiny.gguf")
    read = load_gguf_checkpoint(path)["config"]
    written = json.loads((folder / "config.json").read_text())
    for key, value in read.items():
        if key != "unk_token_id":
            assert written[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    model = LlamaForCausalLM(LlamaConfig(**read))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)


def by_hand(tensor: np.ndarray, quantization: TYPE) -> np.ndarray:
    """The values that ggml's block formats stand for, computed from the raw bytes: blocks of 32 along a row."""
    raw = gguf.quants.quantize(tensor, quantization)
    match quantization:
        case TYPE.F16:
            return raw.astype(np.float32)
        case TYPE.BF16:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case TYPE.Q8_0:  # fp16 scale, then 32 int8
            blocks = raw.reshape(-1, 34)
            scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            return (scale * blocks[:, 2:].view(np.int8)).reshape(tensor.shape)
        case TYPE.Q4_1:  # fp16 scale, fp16 minimum, then 16 bytes: low nibbles are values 0-15, high ones 16-31
            blocks = raw.reshape(-1, 20)
            scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
            nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            return (nibbles * scale + minimum).reshape(tensor.shape)
    raise AssertionError(quantization)


@pytest.mark.parametrize("quantization", [TYPE.F16, TYPE.BF16, TYPE.Q8_0, TYPE.Q4_1], ids=lambda q: q.name)
def test_quantized_weights_become_the_exact_values_they_stand_for(tmp_path: Path, quantization: TYPE) -> None:
    tiny = tiny_gguf()
    tiny.quantization = quantization
    found = load_file(convert(tiny, tmp_path) / "model.safetensors")
    for layer in range(LAYERS):
        value = found[f"model.layers.{layer}.self_attn.v_proj.weight"]
        np.testing.assert_array_equal(value, by_hand(tiny.tensors[f"blk.{layer}.attn_v.weight"], quantization))
        # Rows are whole quantized rows, so that permuting and quantizing commute.
        query = found[f"model.layers.{layer}.self_attn.q_proj.weight"]
        original = tiny.weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(query, by_hand(original, quantization))


def test_tensors_larger_than_a_chunk_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.models.gguf_convert._CHUNK_ELEMENTS", 1)
    tiny = tiny_gguf()
    found = load_file(convert(tiny, tmp_path) / "model.safetensors")
    for name, weight in tiny.weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_configuration(tmp_path: Path) -> None:
    tiny = tiny_gguf()
    tiny.metadata["tokenizer.ggml.eot_token_id"] = 0
    folder = convert(tiny, tmp_path)
    config = load_decoder_config(folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, HEAD_DIM)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, len(tiny.tokens))
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (20000.0, 1e-5, 512)
    assert config.tie_word_embeddings
    assert not config.attention_bias
    assert config.eos_token_ids == {0, 2}
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_progress_runs_from_little_to_all(tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []
    folder = tmp_path / "model"
    folder.mkdir()
    tiny = tiny_gguf()
    convert_gguf(tiny.write(tmp_path / "t.gguf"), folder, lambda done, total: seen.append((done, total)))
    total = 4 * sum(weight.size for weight in tiny.weights.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


# ---- files that are refused ----


def rename_tensor(tiny: TinyGGUF, old: str, new: str) -> None:
    tiny.tensors[new] = tiny.tensors.pop(old)


def set_architecture(tiny: TinyGGUF) -> None:
    tiny.architecture = "qwen2"


def set_not_finite(tiny: TinyGGUF) -> None:
    tiny.tensors["blk.1.ffn_up.weight"][3, 4] = np.inf


def shorten_vocabulary(tiny: TinyGGUF) -> None:
    tiny.metadata["llama.vocab_size"] = 200


def cut_rows(tiny: TinyGGUF) -> None:
    tiny.tensors["token_embd.weight"] = tiny.tensors["token_embd.weight"][:-1]


def foreign_merge(tiny: TinyGGUF) -> None:
    tiny.merges.append("zzz yyy")


def set_metadata(key: str, value: object) -> Callable[[TinyGGUF], object]:
    return lambda tiny: tiny.metadata.__setitem__(key, value)


REFUSED: list[tuple[str, Callable[[TinyGGUF], object], list[str]]] = [
    ("architecture", set_architecture, ["'qwen2'", "'llama'"]),
    ("adapter", set_metadata("general.type", "adapter"), ["adapter", "model"]),
    ("experts", set_metadata("llama.expert_count", 8), ["8 experts", "dense"]),
    ("rope scaling", set_metadata("llama.rope.scaling.type", "yarn"), ["yarn"]),
    ("split file", set_metadata("split.count", 3), ["3 parts"]),
    ("tokenizer kind", set_metadata("tokenizer.ggml.model", "llama"), ["'llama'", "'gpt2'"]),
    (
        "pre-tokenizer",
        set_metadata("tokenizer.ggml.pre", "deepseek-llm"),
        ["'deepseek-llm'", "'smollm'", "'llama-bpe'"],
    ),
    ("no block count", lambda tiny: tiny.metadata.pop("llama.block_count"), ["'llama.block_count'"]),
    ("text as a count", set_metadata("llama.block_count", "two"), ["'llama.block_count'", "str", "int"]),
    ("zero heads", set_metadata("llama.attention.head_count", 0), ["num_heads=0"]),
    ("partial rotation", set_metadata("llama.rope.dimension_count", 8), ["8", "16"]),
    ("eos id", set_metadata("tokenizer.ggml.eos_token_id", 9999), ["9999", "269"]),
    ("vocabulary", shorten_vocabulary, ["269", "200"]),
    ("missing tensor", lambda tiny: tiny.tensors.pop("blk.1.ffn_up.weight"), ["blk.1.ffn_up.weight"]),
    ("bias", lambda tiny: tiny.tensors.update({"blk.0.attn_q.bias": np.zeros(64, np.float32)}), ["blk.0.attn_q.bias"]),
    ("fewer rows", cut_rows, ["token_embd.weight", "(268, 64)", "(269, 64)"]),
    ("not finite", set_not_finite, ["blk.1.ffn_up.weight", "finite"]),
    ("types", lambda tiny: tiny.token_types.pop(), ["269 tokens", "268 token types"]),
    ("merges", foreign_merge, ["merges"]),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_by_name(tmp_path: Path, change: Callable[[TinyGGUF], object], words: list[str]) -> None:
    tiny = tiny_gguf()
    change(tiny)
    with pytest.raises(ModelError) as caught:
        convert(tiny, tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "tiny.gguf") in message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.3, 0.6, 0.9, 0.9999])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, share: float) -> None:
    path = tiny_gguf().write(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"tiny\.gguf .*(truncated|not a GGUF)"):
        convert_gguf(path, tmp_path, lambda done, total: None)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"GG", b"PK\x03\x04" + bytes(100), b"GGUF" + b"\xff" * 200, b"GGUF\x03\x00\x00\x00" + b"\x7f" * 500],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"foreign\.gguf is (a truncated or damaged|not a) GGUF file"):
        convert_gguf(path, tmp_path, lambda done, total: None)


def test_a_damaged_count_ends_at_once(tmp_path: Path) -> None:
    """An array that claims 2**60 elements must not be read element by element past the end of the file."""
    path = tiny_gguf().write(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    array = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    data[array : array + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        convert_gguf(path, tmp_path, lambda done, total: None)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf cannot be read"):
        convert_gguf(tmp_path / "none.gguf", tmp_path, lambda done, total: None)


# ---- the default model ----


def test_the_default_model_has_the_shape_of_smollm2(smollm2: ModelSource) -> None:
    assert smollm2.path is not None
    config = load_decoder_config(smollm2.path)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_position_embeddings, config.head_dim) == (49152, 8192, 64)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {2}
