"""What a layer keeps of each token, and for how long: heads, latents and windows, from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from backend.analysis.config_fields import DEFAULTS, MAX_LAYERS, ConfigFields
from backend.models.model_config import DecoderConfig

AttentionKind = Literal["MHA", "GQA", "MQA", "MLA"]

# Layers of these models hold something else than one key and one value per token and KV head, or not all of them do.
_OTHER_STATE = (
    "add_cross_attention",
    "attention_chunk_size",
    "attention_k_eq_v",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "cross_attention_layers",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_override_pattern",
    "index_head_dim",
    "is_encoder_decoder",
    "layers_block_type",
    "mamba_d_state",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "ssm_cfg",
    "state_size",
)
_EVERY_LAYER_SLIDES = {"mistral", "mixtral", "phi3", "qwen3_moe"}
_DEFAULT_PATTERN = {"gemma2": 2, "gemma3_text": 6}
_WITHOUT_SWITCH = {"mistral", "mixtral", "phi3", *_DEFAULT_PATTERN}  # these do not read use_sliding_window


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of a decoder, as far as it decides the size of its KV cache."""

    model_type: str
    kind: AttentionKind
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # 1 for MLA: every head reads the same latent
    head_dim: int  # of a key and of a value; for MLA of the latent, kv_lora_rank
    rope_dim: int | None  # MLA only: qk_rope_head_dim, the rotated key that is kept beside the latent
    windows: tuple[int | None, ...]  # tokens, per layer; None for full attention
    max_position_embeddings: int | None  # tokens; None where the config does not say
    checkpoint_dtype: str | None  # as the config says; None where it does not

    @property
    def vectors(self) -> tuple[tuple[int, int], ...]:
        """(how many, values in each) of the vectors that one layer keeps of one token."""
        if self.rope_dim is not None:
            return ((1, self.head_dim), (1, self.rope_dim))
        return ((2 * self.num_kv_heads, self.head_dim),)

    @property
    def values_per_token_and_layer(self) -> int:
        return sum(count * length for count, length in self.vectors)


def read_attention_shape(config: Mapping[str, Any]) -> AttentionShape:
    """Read a Hugging Face config, nested under `text_config` or not.

    Families that transformers knows by other names than Llama's are read by theirs; a family that is not known is read by
    the usual names, and what would change its cache is refused.

    Raises:
        ValueError: a field is missing, wrong, or describes layers whose state is not keys and values.
    """
    fields = ConfigFields(config)
    for name in _OTHER_STATE:
        if fields.get(name) not in (None, 0, False, [], {}):
            raise ValueError(
                f"{name} is set: layers that do not all keep a key and a value per token are not supported"
            )
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if fields.get("kv_lora_rank") is not None:
        kind: AttentionKind = "MLA"
        num_kv_heads, head_dim = 1, fields.integer("kv_lora_rank")
        rope_dim = fields.integer("qk_rope_head_dim")
    else:
        num_kv_heads, rope_dim = _num_kv_heads(fields, num_heads), None
        head_dim = _head_dim(fields, hidden_size, num_heads)
        kind = "MHA" if num_kv_heads == num_heads else "MQA" if num_kv_heads == 1 else "GQA"
    return AttentionShape(
        model_type=fields.model_type,
        kind=kind,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        windows=_windows(fields, num_layers),
        max_position_embeddings=fields.optional_integer("max_position_embeddings"),
        checkpoint_dtype=fields.text("dtype", "").removeprefix("torch.") or None,
    )


def config_of_decoder(decoder: DecoderConfig) -> dict[str, Any]:
    """The Hugging Face config of a model that the engine runs, dummies and GGUF files included."""
    named = decoder.checkpoint_dtype not in ("unknown", "generated")
    sliding = frozenset(decoder.sliding_layers)
    types = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(decoder.num_layers)]
    chosen = {"sliding_window": decoder.sliding_window, "use_sliding_window": bool(sliding), "layer_types": types}
    family, windows = {
        "LlamaForCausalLM": ("llama", {}),
        "MistralForCausalLM": ("mistral", {"sliding_window": decoder.sliding_window}),
        "Qwen2ForCausalLM": ("qwen2", chosen),
        "Qwen3ForCausalLM": ("qwen3", chosen),
    }[decoder.architecture]
    return {
        "model_type": family,
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "max_position_embeddings": decoder.max_position_embeddings,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "attention_bias": decoder.attention_bias,
        "mlp_bias": decoder.mlp_bias,
        **windows,
    } | ({"dtype": decoder.checkpoint_dtype} if named else {})


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    if not fields.flag("new_decoder_architecture"):
        if fields.flag("multi_query"):
            return 1
        if fields.model_type == "falcon":  # writes num_kv_heads, and reads it in the new architecture only
            return num_heads
    # Left out, it equals the query heads in the families that are known; of any other that would be a guess.
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if fields.model_type in DEFAULTS else None)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    return num_kv_heads


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    if fields.has("v_head_dim"):
        raise ValueError("v_head_dim is set without kv_lora_rank: keys and values of two sizes are not supported")
    if fields.get("head_dim") is not None and fields.model_type not in ("falcon", "gpt2"):
        return fields.integer("head_dim")
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def _windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    is_on = fields.model_type in _WITHOUT_SWITCH or fields.flag("use_sliding_window", True)
    window = fields.optional_integer("sliding_window") if is_on else None
    types = fields.items("layer_types", str)
    if types is None:
        slides = _slides(fields, num_layers) if window is not None else [False] * num_layers
        return tuple(window if sliding else None for sliding in slides)
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries, not one for each of num_hidden_layers {num_layers}")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types names {name!r}; supported: full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ValueError(
            "layer_types names sliding_attention, but sliding_window is missing or use_sliding_window false"
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def _slides(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Which layers have the window, in configs that do not list `layer_types`; as transformers fills them in."""
    family, layers = fields.model_type, range(num_layers)
    if family in _EVERY_LAYER_SLIDES:
        return [True] * num_layers
    if family in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", least=0)
        return [layer >= first for layer in layers]
    if family == "qwen2_moe":
        end = fields.integer("max_window_layers", least=0)
        return [layer % 2 == 0 and layer < end for layer in layers]
    if family in _DEFAULT_PATTERN or fields.get("sliding_window_pattern") is not None:
        pattern = fields.integer("sliding_window_pattern", _DEFAULT_PATTERN.get(family))
        return [(layer + 1) % pattern != 0 for layer in layers]
    raise ValueError(
        f"sliding_window is set, but layer_types is missing: which layers of {family} have it is not known"
    )
