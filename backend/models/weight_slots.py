"""Where each tensor of a Hugging Face checkpoint goes in the generic decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from backend.errors import ModelError
from backend.layers.linear import Linear
from backend.models.checkpoint import Checkpoint
from backend.models.decoder import Decoder, DecoderLayer
from backend.models.model_config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Recomputed from the config; older checkpoints carry them along.
REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"

_MAX_NAMES_IN_MESSAGE = 8


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


def check_weights(config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Raise `ModelError`, as loading it would, unless a checkpoint that is not quantized has all that `config` asks for.

    By the files' headers: no weight is read.
    """
    # A head beside the embedding it is tied to is the model's own if it differs, and has the embedding's shape if not.
    config = replace(config, tie_word_embeddings=config.tie_word_embeddings and HEAD not in checkpoint)
    check_slots(checkpoint, weight_slots(Decoder(config, dtype=torch.float32, device=torch.device("meta"))))


def check_slots(checkpoint: Checkpoint, slots: Mapping[str, Tensor]) -> set[str]:
    """Raise `ModelError` unless the checkpoint holds floats for all slots, in their shapes. Returns the stored dtypes."""
    if missing := [name for name in slots if name not in checkpoint]:
        hint = " (tie_word_embeddings is not true in config.json)" if HEAD in missing else ""
        raise ModelError(f"{checkpoint.folder}: the checkpoint lacks {listed(missing)}{hint}")
    for name, slot in slots.items():
        if checkpoint.shape(name) != tuple(slot.shape):
            raise ModelError(
                f"{checkpoint.path(name)}: {name} has shape {list(checkpoint.shape(name))}, "
                f"and config.json asks for {list(slot.shape)}"
            )
    return {checkpoint.dtype(name) for name in slots}


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, the first few of many."""
    shown = ", ".join(names[:_MAX_NAMES_IN_MESSAGE])
    hidden = len(names) - _MAX_NAMES_IN_MESSAGE
    return f"{shown} and {hidden} more" if hidden > 0 else shown
