"""GGUF file of a Llama model -> Hugging Face folder: fp32 safetensors, configuration and tokenizer.

llama.cpp stores the rows of q and k permuted, since its rotation pairs neighbouring dimensions (2i, 2i+1) where Hugging
Face's pairs the halves (i, i + head_dim/2); here they are put back. Every quantization type that the `gguf` library can
read is converted to the exact fp32 values it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from backend.errors import ModelError
from backend.models.gguf_file import GGUFFile
from backend.models.gguf_tokenizer import build_tokenizer_files, ending_token_ids
from backend.models.safetensors_file import Float32Tensor, write_float32

_CHUNK_ELEMENTS = 2**22  # 16 MiB of fp32 at a time, whatever the tensor's size

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Conversion:
    """What was converted."""

    num_tensors: int
    num_parameters: int


@dataclass(frozen=True)
class _Shape:
    """Dimensions of a Llama model, as its GGUF metadata gives them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


def convert_gguf(path: Path, folder: Path, on_bytes: Callable[[float, float], None]) -> Conversion:
    """Convert the GGUF file `path` into the files of a Hugging Face model in `folder`.

    Everything is checked before the first byte is written, except for weights that are not finite.

    Args:
        path: GGUF file, version 2 or 3, of architecture `llama`.
        folder: existing folder to write to: model.safetensors, config.json, generation_config.json, tokenizer.json,
            tokenizer_config.json.
        on_bytes: called with (done, total) bytes of fp32 weights.

    Raises:
        ModelError: the file is foreign, truncated, or of a kind that is not supported.
        OSError: `folder` cannot be written.
    """
    file = GGUFFile(path)
    _check_supported(file)
    shape = _read_shape(file)
    sources = _match_tensors(file, shape)
    config, generation_config = _build_configs(file, shape)
    texts = build_tokenizer_files(file)
    texts["config.json"] = _to_json(config)
    texts["generation_config.json"] = _to_json(generation_config)

    tensors = [
        Float32Tensor(name, _row_major(source), lambda source=source: _rows(file, source, shape.head_dim))
        for name, source in sources.items()
    ]
    total = sum(tensor.num_bytes for tensor in tensors)
    write_float32(folder / "model.safetensors", tensors, lambda done: on_bytes(done, total))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return Conversion(num_tensors=len(tensors), num_parameters=total // 4)


def _check_supported(file: GGUFFile) -> None:
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise ModelError(f"{file.path} holds a GGUF {kind}, not a model")
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"{file.path} is of GGUF architecture {architecture!r}; supported: 'llama'")
    experts = file.get("llama.expert_count", int, 0)
    if experts > 0:
        raise ModelError(f"{file.path} is a mixture of {experts} experts; supported: dense Llama models")
    scaling = file.get("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelError(
            f"{file.path} scales its rotary embedding ({scaling}); GGUF files without scaling are supported"
        )


def _read_shape(file: GGUFFile) -> _Shape:
    num_heads = file.get("llama.attention.head_count", int)
    hidden_size = file.get("llama.embedding_length", int)
    head_dim = file.get("llama.attention.key_length", int, hidden_size // num_heads if num_heads else 0)
    num_kv_heads = file.get("llama.attention.head_count_kv", int, num_heads)
    shape = _Shape(
        num_layers=file.get("llama.block_count", int),
        hidden_size=hidden_size,
        intermediate_size=file.get("llama.feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=len(file.strings("tokenizer.ggml.tokens")),
    )
    if not all(vars(shape).values()) or num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(f"{file.path} has impossible dimensions: {shape}")
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        size = file.get(key, int, head_dim)
        if size != head_dim:
            raise ModelError(f"{file.path}: {key} = {size} is not supported; expected the head size {head_dim}")
    stated = file.get("llama.vocab_size", int, shape.vocab_size)
    if stated != shape.vocab_size:
        raise ModelError(f"{file.path}: the tokenizer has {shape.vocab_size} tokens, the model {stated}")
    return shape


def _match_tensors(file: GGUFFile, shape: _Shape) -> dict[str, gguf.ReaderTensor]:
    """The file's tensors by their Hugging Face names; none missing, none left over, all of the right shape and type."""
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer_shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (shape.intermediate_size, hidden),
        "ffn_up": (shape.intermediate_size, hidden),
        "ffn_down": (hidden, shape.intermediate_size),
    }
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    expected["token_embd.weight"] = ("model.embed_tokens.weight", (shape.vocab_size, hidden))
    for layer in range(shape.num_layers):
        for short, name in _LAYER_NAMES.items():
            expected[f"blk.{layer}.{short}.weight"] = (f"model.layers.{layer}.{name}.weight", layer_shapes[short])
    expected["output_norm.weight"] = ("model.norm.weight", (hidden,))
    if "output.weight" in file.tensors:  # absent: the embedding serves as output layer too
        expected["output.weight"] = ("lm_head.weight", (shape.vocab_size, hidden))

    missing = [name for name in expected if name not in file.tensors]
    foreign = [name for name in file.tensors if name not in expected]
    if missing:
        raise ModelError(f"{file.path} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} among them")
    if foreign:
        raise ModelError(f"{file.path} has tensors that a Llama model without biases has not: {', '.join(foreign[:3])}")
    matched = {}
    for gguf_name, (name, wanted) in expected.items():
        tensor = file.tensors[gguf_name]
        found = _row_major(tensor)
        if found != wanted:
            raise ModelError(f"{file.path}: tensor {gguf_name} has shape {found}; the metadata asks for {wanted}")
        try:
            dequantize(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(
                f"{file.path}: tensor {gguf_name} is of type {tensor.tensor_type.name}, which cannot be converted"
            ) from None
        matched[name] = tensor
    return matched


def _rows(file: GGUFFile, tensor: gguf.ReaderTensor, head_dim: int) -> Iterator[np.ndarray]:
    """The tensor's fp32 rows in chunks of whole heads; those of q and k in Hugging Face's order."""
    permuted = tensor.name.endswith((".attn_q.weight", ".attn_k.weight"))
    row_length = int(tensor.shape[0])
    step = max(1, _CHUNK_ELEMENTS // (row_length * head_dim)) * head_dim
    if tensor.data.ndim == 1:  # a vector may be stored as bytes: not to be cut between elements
        step = len(tensor.data)
    for start in range(0, len(tensor.data), step):
        rows = dequantize(tensor.data[start : start + step], tensor.tensor_type)
        if not np.isfinite(rows).all():
            raise ModelError(f"{file.path} is damaged: tensor {tensor.name} holds values that are not finite")
        yield unpermute_heads(rows, head_dim) if permuted else rows


def unpermute_heads(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows within each head.

    Row 2i + s of a head there is row i + s * head_dim/2 here, for s in {0, 1}.

    Args:
        rows: [num_heads * head_dim, in_features].
        head_dim: even.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _build_configs(file: GGUFFile, shape: _Shape) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `generation_config.json`."""
    token_ids: dict[str, Any] = {}
    endings = ending_token_ids(file)
    if endings:
        token_ids["eos_token_id"] = endings if len(endings) > 1 else endings[0]
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if file.has(f"tokenizer.ggml.{key}"):
            token_ids[name] = file.get(f"tokenizer.ggml.{key}", int)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(file.get("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.get("llama.rope.freq_base", float, 10000.0)),
        "max_position_embeddings": file.get("llama.context_length", int),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **token_ids,
    }
    return config, token_ids


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _row_major(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """GGUF lists dimensions fastest first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
