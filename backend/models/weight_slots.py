"""Where each tensor of a Hugging Face checkpoint goes in the generic decoder."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from backend.layers.linear import Linear
from backend.models.decoder import Decoder, DecoderLayer

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Recomputed from the config; older checkpoints carry them along.
REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"


def weight_slots(decoder: Decoder) -> dict[str, Tensor]:
    """Checkpoint name -> the view to copy that tensor into. Together the views cover every parameter exactly once.

    A tied head has no slot of its own. Must be called before `Decoder.prepare`.
    """
    slots: dict[str, Tensor] = {EMBEDDING: decoder.embedding.data, "model.norm.weight": decoder.final_norm.weight.data}
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        slots |= {f"model.layers.{index}.{name}": view for name, view in _layer_slots(decoder, layer)}
    if not decoder.config.tie_word_embeddings:
        slots |= dict(_linear_slots(decoder.head, {"lm_head": decoder.config.vocab_size}))
    return slots


def _layer_slots(decoder: Decoder, layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    config = decoder.config
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", layer.attention_norm.weight.data
    yield "post_attention_layernorm.weight", layer.mlp_norm.weight.data
    yield from _linear_slots(
        layer.attention.qkv, {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    )
    yield from _linear_slots(layer.attention.output, {"self_attn.o_proj": config.hidden_size})
    yield from _linear_slots(
        layer.mlp.gate_up, {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}
    )
    yield from _linear_slots(layer.mlp.down, {"mlp.down_proj": config.hidden_size})


def _linear_slots(linear: Linear, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The rows of a merged linear layer that belong to each projection: `sizes` maps name -> number of rows, in order."""
    for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
        if parameter is not None:
            for name, view in zip(sizes, parameter.data.split(list(sizes.values())), strict=True):
                yield f"{name}.{kind}", view
