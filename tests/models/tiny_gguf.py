"""A small random Llama model as a GGUF file, written with the `gguf` library, and what it was written from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from backend.models.gguf_convert import convert_gguf

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Merges of merges, and one that would cross from a line end into a digit if digits were not split off.
MERGES = ["Ġ t", "h e", "Ġt he", "Ċ Ċ", "Ċ 1", "1 2", "12 3", "i n", "in g", "Ġ Ġ"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 2, 4, 2, 16, 64, 96


@dataclass
class TinyGGUF:
    """What goes into the file; tests change it before `write`.

    Attributes:
        weights: fp32 by Hugging Face name, in Hugging Face's order of rows.
        tensors: what is written, by GGUF name, in llama.cpp's order of rows.
        metadata: by key, beside the tokenizer's lists.
    """

    weights: dict[str, np.ndarray]
    tensors: dict[str, np.ndarray]
    metadata: dict[str, Any]
    tokens: list[str]
    token_types: list[int]
    merges: list[str] = field(default_factory=lambda: list(MERGES))
    architecture: str = "llama"
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        writer.add_token_merges(self.merges)
        for name, tensor in self.tensors.items():
            if tensor.ndim == 1 or self.quantization == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, quantize(tensor, self.quantization), raw_dtype=self.quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def tiny_gguf(seed: int = 0, *, tied: bool = True, pre: str = "smollm") -> TinyGGUF:
    tokens = [*SPECIALS, *ALPHABET, *("".join(merge.split()) for merge in MERGES)]
    token_types: list[int] = [int(gguf.TokenType.CONTROL)] * len(SPECIALS) + [int(gguf.TokenType.NORMAL)] * (
        len(tokens) - len(SPECIALS)
    )
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(HIDDEN)).astype(np.float32)

    weights, tensors = {}, {}

    def put(name: str, gguf_name: str, value: np.ndarray, permuted: bool = False) -> None:
        weights[name] = value
        tensors[gguf_name] = permute(value) if permuted else value

    put("model.embed_tokens.weight", "token_embd.weight", matrix(len(tokens), HIDDEN))
    for layer in range(LAYERS):
        hf, ggml = f"model.layers.{layer}", f"blk.{layer}"
        put(f"{hf}.input_layernorm.weight", f"{ggml}.attn_norm.weight", norm())
        put(f"{hf}.self_attn.q_proj.weight", f"{ggml}.attn_q.weight", matrix(HEADS * HEAD_DIM, HIDDEN), True)
        put(f"{hf}.self_attn.k_proj.weight", f"{ggml}.attn_k.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN), True)
        put(f"{hf}.self_attn.v_proj.weight", f"{ggml}.attn_v.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN))
        put(f"{hf}.self_attn.o_proj.weight", f"{ggml}.attn_output.weight", matrix(HIDDEN, HEADS * HEAD_DIM))
        put(f"{hf}.post_attention_layernorm.weight", f"{ggml}.ffn_norm.weight", norm())
        put(f"{hf}.mlp.gate_proj.weight", f"{ggml}.ffn_gate.weight", matrix(INTERMEDIATE, HIDDEN))
        put(f"{hf}.mlp.up_proj.weight", f"{ggml}.ffn_up.weight", matrix(INTERMEDIATE, HIDDEN))
        put(f"{hf}.mlp.down_proj.weight", f"{ggml}.ffn_down.weight", matrix(HIDDEN, INTERMEDIATE))
    put("model.norm.weight", "output_norm.weight", norm())
    if not tied:
        put("lm_head.weight", "output.weight", matrix(len(tokens), HIDDEN))

    metadata = {
        "general.type": "model",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 20000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return TinyGGUF(weights, tensors, metadata, tokens, token_types)


def permute(weight: np.ndarray) -> np.ndarray:
    """llama.cpp's order, row by row: within a head, dimension i of the first half goes to 2i, of the second to 2i + 1."""
    result = np.empty_like(weight)
    for start in range(0, len(weight), HEAD_DIM):
        for i in range(HEAD_DIM // 2):
            result[start + 2 * i] = weight[start + i]
            result[start + 2 * i + 1] = weight[start + HEAD_DIM // 2 + i]
    return result


def convert(tiny: TinyGGUF, tmp_path: Path) -> Path:
    """Write `tiny` and convert it; returns the folder of the model."""
    folder = tmp_path / "model"
    folder.mkdir()
    convert_gguf(tiny.write(tmp_path / "tiny.gguf"), folder, lambda done, total: None)
    return folder
