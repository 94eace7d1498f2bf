"""Where each tensor of a Hugging Face checkpoint goes in the generic decoder."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from backend.layers.linear import Linear
from backend.models.decoder import Decoder, DecoderLayer
from backend.models.model_config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Recomputed from the config; older checkpoints carry them along.
REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"


class MergedLinear(NamedTuple):
    """Projections of the same input, side by side in one linear module."""

    in_features: int
    projections: dict[str, int]  # name -> number of rows, in order


def layer_linears(config: DecoderConfig) -> dict[str, MergedLinear]:
    """The linear modules of a layer, by their names in it."""
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attention.qkv": MergedLinear(
            hidden_size, {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        ),
        "attention.output": MergedLinear(query_size, {"self_attn.o_proj": hidden_size}),
        "mlp.gate_up": MergedLinear(
            hidden_size, {"mlp.gate_proj": intermediate_size, "mlp.up_proj": intermediate_size}
        ),
        "mlp.down": MergedLinear(intermediate_size, {"mlp.down_proj": hidden_size}),
    }


def weight_slots(decoder: Decoder) -> dict[str, Tensor]:
    """Checkpoint name -> the view to copy that tensor into. Together the views cover every parameter exactly once.

    A tied head has no slot of its own. Must be called before `Decoder.prepare`.
    """
    slots: dict[str, Tensor] = {EMBEDDING: decoder.embedding.data, "model.norm.weight": decoder.final_norm.weight.data}
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{index}"
        slots[f"{prefix}.input_layernorm.weight"] = layer.attention_norm.weight.data
        slots[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm.weight.data
        for name, norm in (("q_norm", layer.attention.q_norm), ("k_norm", layer.attention.k_norm)):
            if norm is not None:
                slots[f"{prefix}.self_attn.{name}.weight"] = norm.weight.data
        for module, merged in layer_linears(decoder.config).items():
            linear = layer.get_submodule(module)
            assert isinstance(linear, Linear)
            slots |= linear_slots(linear, {f"{prefix}.{name}": rows for name, rows in merged.projections.items()})
    if not decoder.config.tie_word_embeddings:
        slots |= linear_slots(decoder.head, {"lm_head": decoder.config.vocab_size})
    return slots


def linear_slots(linear: Linear, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The rows of a merged linear layer that belong to each projection: `sizes` maps name -> number of rows, in order."""
    return {
        f"{name}.{kind}": view
        for kind, parameter in (("weight", linear.weight), ("bias", linear.bias))
        if parameter is not None
        for name, view in zip(sizes, parameter.data.split(list(sizes.values())), strict=True)
    }
