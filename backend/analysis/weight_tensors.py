"""The weight tensors of a decoder, family by family, from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backend.analysis.attention_shape import AttentionShape
from backend.analysis.config_fields import ConfigFields

Part = Literal["embedding", "head", "attention", "mlp", "norms"]

UNQUANTIZED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BITS = {"fp8_e4m3": 8, "int8": 8, "int4": 4}
_FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """`count` tensors of one shape. `columns` are a matrix' input features; a vector has one column."""

    part: Part
    name: str
    count: int
    rows: int
    columns: int = 1
    linear: bool = False  # a linear layer inside the decoder's layers, which weight quantization replaces

    @property
    def num_parameters(self) -> int:
        return self.count * self.rows * self.columns

    def num_bytes(self, dtype: str, group_size: int) -> int:
        if dtype in UNQUANTIZED_BYTES:
            return self.num_parameters * UNQUANTIZED_BYTES[dtype]
        if not self.linear:
            return self.num_parameters * UNQUANTIZED_BYTES["bfloat16"]
        row = -(-self.columns * QUANTIZED_BITS[dtype] // 8)
        if dtype == "int4":
            row += -(-self.columns // group_size) * 2 * _FP16_BYTES
        else:
            row += _FP16_BYTES
        return self.count * self.rows * row


@dataclass(frozen=True, slots=True)
class _Family:
    """How the layers of a model type differ from Llama's. A string names the config's flag that decides."""

    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    gated: bool = True  # gate, up and down projection; else up and down
    norm_bias: bool = False  # LayerNorm; else RMSNorm, which has a scale alone
    norms_per_layer: int = 2
    qk_norm: bool | str = False
    head_bias: bool = False
    learned_positions: bool = False


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(mlp_bias="mlp_bias"),
    "mistral": _Family(qkv_bias=False, o_bias=False),
    "mixtral": _Family(qkv_bias=False, o_bias=False),
    "qwen2": _Family(qkv_bias=True, o_bias=False),
    "qwen2_moe": _Family(qkv_bias="qkv_bias", o_bias=False),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True),
    "gemma": _Family(),
    "gemma2": _Family(norms_per_layer=4),
    "gemma3_text": _Family(norms_per_layer=4, qk_norm=True),
    "gpt2": _Family(qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, norm_bias=True, learned_positions=True),
    "falcon": _Family(qkv_bias="bias", o_bias="bias", mlp_bias="bias", gated=False, norm_bias=True),
    "phi": _Family(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        norm_bias=True,
        norms_per_layer=1,
        qk_norm="qk_layernorm",
        head_bias=True,
    ),
    "phi3": _Family(qkv_bias=False, o_bias=False),
    "deepseek_v2": _Family(mlp_bias="mlp_bias"),
    "deepseek_v3": _Family(),
}


def weight_tensors(fields: ConfigFields, shape: AttentionShape) -> list[WeightTensor]:
    """Every tensor of the decoder; buffers are none.

    Raises:
        ValueError: a field is missing or wrong, or `model_type` is none of those whose layers are known.
    """
    family = _FAMILIES.get(fields.model_type)
    if family is None:
        raise ValueError(
            f"model_type {fields.model_type!r} is not one whose weights are known: {', '.join(_FAMILIES)}; "
            "take the size of its files"
        )
    hidden, layers, vocab = shape.hidden_size, shape.num_layers, fields.integer("vocab_size")
    tensors = [WeightTensor("embedding", "tokens", 1, vocab, hidden)]
    if family.learned_positions:
        tensors.append(WeightTensor("embedding", "positions", 1, fields.integer("max_position_embeddings"), hidden))
    if not fields.flag("tie_word_embeddings"):
        tensors.append(WeightTensor("head", "head", 1, vocab, hidden))
    if family.head_bias:
        tensors.append(WeightTensor("head", "head bias", 1, vocab))
    if shape.kind == "MLA":
        tensors += _latent_attention(fields, shape)
    else:
        tensors += _attention(fields, shape, family)
    tensors += _mlps(fields, shape, family)
    per_layer = _falcon_norms(fields) if fields.model_type == "falcon" else family.norms_per_layer
    tensors.append(WeightTensor("norms", "norms", (per_layer * layers + 1) * (1 + family.norm_bias), hidden))
    return tensors


def _on(fields: ConfigFields, rule: bool | str) -> bool:
    return fields.flag(rule) if isinstance(rule, str) else rule


def _attention(fields: ConfigFields, shape: AttentionShape, family: _Family) -> list[WeightTensor]:
    layers, hidden = shape.num_layers, shape.hidden_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = [
        WeightTensor("attention", "query", layers, query, hidden, linear=True),
        WeightTensor("attention", "key and value", 2 * layers, key, hidden, linear=True),
        WeightTensor("attention", "output", layers, hidden, query, linear=True),
    ]
    if _on(fields, family.qkv_bias):
        tensors.append(WeightTensor("attention", "query, key and value bias", layers, query + 2 * key))
    if _on(fields, family.o_bias):
        tensors.append(WeightTensor("attention", "output bias", layers, hidden))
    if _on(fields, family.qk_norm):
        tensors.append(WeightTensor("norms", "query and key norm", 2 * layers * (1 + family.norm_bias), shape.head_dim))
    return tensors


def _latent_attention(fields: ConfigFields, shape: AttentionShape) -> list[WeightTensor]:
    """Multi-head latent attention (DeepSeek-AI 2024): queries and KV through low-rank projections."""
    layers, hidden, heads = shape.num_layers, shape.hidden_size, shape.num_heads
    latent, rope = shape.head_dim, fields.integer("qk_rope_head_dim")
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    query_rank = fields.optional_integer("q_lora_rank")
    bias = fields.flag("attention_bias")
    tensors = [
        WeightTensor("attention", "KV down", layers, latent + rope, hidden, linear=True),
        WeightTensor("attention", "KV up", layers, heads * (nope + value), latent, linear=True),
        WeightTensor("attention", "output", layers, hidden, heads * value, linear=True),
        WeightTensor("norms", "KV latent norm", layers, latent),
    ]
    if query_rank is None:
        tensors.append(WeightTensor("attention", "query", layers, heads * (nope + rope), hidden, linear=True))
    else:
        tensors += [
            WeightTensor("attention", "query down", layers, query_rank, hidden, linear=True),
            WeightTensor("attention", "query up", layers, heads * (nope + rope), query_rank, linear=True),
            WeightTensor("norms", "query latent norm", layers, query_rank),
        ]
    if bias:
        tensors.append(WeightTensor("attention", "biases", layers, latent + rope + hidden + (query_rank or 0)))
    return tensors


def _mlps(fields: ConfigFields, shape: AttentionShape, family: _Family) -> list[WeightTensor]:
    num_moe = _num_moe_layers(fields, shape.num_layers)
    tensors: list[WeightTensor] = []
    if num_moe < shape.num_layers:
        wide = 4 * shape.hidden_size if fields.model_type in ("gpt2", "falcon") else None
        width = fields.integer("intermediate_size", wide)
        tensors += _mlp(fields, shape, family, "MLP", shape.num_layers - num_moe, width)
    if num_moe == 0:
        return tensors
    experts, hidden = fields.integer("num_local_experts"), shape.hidden_size
    width = fields.integer("intermediate_size" if fields.model_type == "mixtral" else "moe_intermediate_size")
    tensors += [
        WeightTensor("mlp", "router", num_moe, experts, hidden),
        WeightTensor("mlp", "experts' gate and up", 2 * num_moe * experts, width, hidden, linear=True),
        WeightTensor("mlp", "experts' down", num_moe * experts, hidden, width, linear=True),
    ]
    if fields.model_type == "qwen2_moe":
        shared = fields.integer("shared_expert_intermediate_size")
        tensors += _mlp(fields, shape, family, "shared expert", num_moe, shared)
        tensors.append(WeightTensor("mlp", "shared expert's gate", num_moe, 1, hidden))
    if fields.model_type.startswith("deepseek"):
        shared = fields.integer("n_shared_experts") * width
        tensors += _mlp(fields, shape, family, "shared experts", num_moe, shared)
    return tensors


def _mlp(
    fields: ConfigFields, shape: AttentionShape, family: _Family, name: str, count: int, width: int
) -> list[WeightTensor]:
    up = 2 if family.gated else 1
    tensors = [
        WeightTensor(
            "mlp", f"{name} gate and up" if family.gated else f"{name} up", up * count, width, shape.hidden_size, True
        ),
        WeightTensor("mlp", f"{name} down", count, shape.hidden_size, width, True),
    ]
    if _on(fields, family.mlp_bias):
        tensors.append(WeightTensor("mlp", f"{name} biases", count, up * width + shape.hidden_size))
    return tensors


def _num_moe_layers(fields: ConfigFields, num_layers: int) -> int:
    if fields.model_type == "mixtral":
        return num_layers
    if fields.model_type in ("qwen2_moe", "qwen3_moe"):
        dense = frozenset(fields.items("mlp_only_layers", int) or ())
        step = fields.integer("decoder_sparse_step")
        return sum(layer not in dense for layer in range(step - 1, num_layers, step))
    if fields.model_type.startswith("deepseek"):
        return max(0, num_layers - fields.integer("first_k_dense_replace", least=0))
    return 0


def _falcon_norms(fields: ConfigFields) -> int:
    """Norms of a Falcon layer: one where attention and MLP run in parallel, unless each has its own."""
    if not fields.flag("parallel_attn"):
        return 2
    return fields.integer("num_ln_in_parallel_attn", 2 if fields.flag("new_decoder_architecture") else 1)
