"""`DecoderConfig`: what the generic decoder needs to know of a model, read from a checkpoint's config.json.

Read as plain JSON: importing this takes neither torch nor transformers. A feature that the decoder does not have is
refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend.models.json_fields import JsonFields, shown
from backend.quantization.formats.quantization_config import read_quantization
from backend.quantization.formats.scheme import StoredQuantization

SUPPORTED_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """transformers' defaults for a config that leaves the key out, and what it lets a config choose."""

    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: what the hidden size gives each query head
    chooses_attention_bias: bool = False
    chooses_mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: Literal["none", "of all layers", "of chosen layers"] = "none"


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(2048, chooses_attention_bias=True, chooses_mlp_bias=True),
    "MistralForCausalLM": _Architecture(131072, num_kv_heads=8, window="of all layers"),
    "Qwen2ForCausalLM": _Architecture(32768, num_kv_heads=32, qkv_bias=True, window="of chosen layers"),
    "Qwen3ForCausalLM": _Architecture(
        32768,
        num_kv_heads=32,
        head_dim=128,
        chooses_attention_bias=True,
        qk_norm=True,
        window="of chosen layers",
    ),
}
SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)

# transformers' defaults, of all of them.
_ROPE_THETA = 10000.0
_RMS_NORM_EPS = 1e-6
_SLIDING_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28

# Far above any model there is: what lies beyond is a damaged or hostile file, and would only fail later and less clearly.
_MAX_POSITIONS = 2**24
_MAX_VOCAB_SIZE = 2**22
_MAX_HIDDEN_SIZE = 2**18
_MAX_INTERMEDIATE_SIZE = 2**20
_MAX_LAYERS = 2**10
_MAX_HEADS = 2**12
_MAX_HEAD_DIM = 2**12
_RMS_NORM_EPS_RANGE = (1e-20, 1.0)
_ROPE_THETA_RANGE = (1.0, 1e12)
_ROPE_FACTOR_RANGE = (1e-6, 1e6)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low rotary frequencies; see `backend.layers.rotary`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and features of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    checkpoint_dtype: str  # as config.json says ("float32", "bfloat16", ...), "unknown", or "generated" for a dummy
    qkv_bias: bool = False  # of queries, keys and values alone; `attention_bias` gives the output one as well
    qk_norm: bool = False  # each head's query and key are normalised before they are rotated
    sliding_window: int | None = None  # tokens that a token attends to in those layers, itself included
    sliding_layers: tuple[int, ...] = ()
    stored_quantization: StoredQuantization | None = (
        None  # how the checkpoint stores its linear layers; None: as they are
    )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None: it attends to all tokens before."""
        sliding = frozenset(self.sliding_layers)
        return tuple(self.sliding_window if layer in sliding else None for layer in range(self.num_layers))

    def count_parameters(self) -> int:
        """Number of weights, biases and norm scales; a tied head counts once, with the embedding."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (query_size + kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        attention_biases = query_size + 2 * kv_size if self.attention_bias or self.qkv_bias else 0
        attention_biases += self.hidden_size if self.attention_bias else 0
        mlp_biases = 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        layer = attention + mlp + norms + attention_biases + mlp_biases
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def load_decoder_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json and, for further EOS ids, generation_config.json.

    Raises:
        ModelError: a file is missing or malformed, or the model needs something the decoder does not have.
    """
    fields = JsonFields(folder / "config.json")
    name, architecture = _architecture(fields)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error(f"hidden_act {shown(activation)} is not supported; allowed: silu")

    vocab_size = fields.integer("vocab_size", most=_MAX_VOCAB_SIZE)
    hidden_size = fields.integer("hidden_size", most=_MAX_HIDDEN_SIZE)
    num_heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
    # A null says "as many as query heads".
    kv_heads_default = num_heads if fields.has("num_key_value_heads") else architecture.num_kv_heads or num_heads
    num_kv_heads = fields.integer("num_key_value_heads", kv_heads_default, most=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if fields.get("head_dim") is None and architecture.head_dim is None and hidden_size % num_heads:
        raise fields.error(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", architecture.head_dim or hidden_size // num_heads, most=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd: rotary embedding turns pairs")
    max_position_embeddings = fields.integer(
        "max_position_embeddings", architecture.max_position_embeddings, least=2, most=_MAX_POSITIONS
    )  # a prompt and an output have a token each
    rope_theta, rope_scaling = _rope(fields, max_position_embeddings)
    num_layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    sliding_window, sliding_layers = _windows(fields, name, num_layers)

    return DecoderConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", most=_MAX_INTERMEDIATE_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", _RMS_NORM_EPS, within=_RMS_NORM_EPS_RANGE),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=architecture.chooses_attention_bias and fields.flag("attention_bias", False),
        mlp_bias=architecture.chooses_mlp_bias and fields.flag("mlp_bias", False),
        eos_token_ids=_eos_token_ids(fields, vocab_size),
        checkpoint_dtype=fields.text("dtype", fields.text("torch_dtype", "unknown")),
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        stored_quantization=read_quantization(fields),
    )


def _architecture(fields: JsonFields) -> tuple[str, _Architecture]:
    named = fields.get("architectures")
    supported = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    if not isinstance(named, list) or not named:
        raise fields.error(f"names no architecture; {supported}")
    if named[0] not in SUPPORTED_ARCHITECTURES:
        raise fields.error(f"architecture {shown(named[0])} is not supported; {supported}")
    return named[0], _ARCHITECTURES[named[0]]


def _windows(fields: JsonFields, name: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it, as transformers' model of that architecture reads them."""
    which = _ARCHITECTURES[name].window
    if which == "none":
        fields.refuse("sliding_window", f"attention windows of {name} are")
        return None, ()
    is_on = which == "of all layers" or fields.flag("use_sliding_window", False)
    window = None
    if is_on and (fields.get("sliding_window") is not None or not fields.has("sliding_window")):  # a null says "none"
        window = fields.integer("sliding_window", _SLIDING_WINDOW, most=_MAX_POSITIONS)
    types = fields.get("layer_types")
    if which == "of all layers":
        fields.refuse("layer_types", f"layers of two kinds in a {name}, which has a window in all or none, are")
        sliding = range(num_layers)
    elif types is None:
        sliding = range(
            min(num_layers, fields.integer("max_window_layers", _MAX_WINDOW_LAYERS, least=0, most=2**31)), num_layers
        )
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.error(f"layer_types {shown(types)} is not a list of {num_layers} names, one for each layer")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.error(f"layer_types names {shown(kind)}; supported: full_attention, sliding_attention")
        sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
        if sliding and window is None:
            raise fields.error(
                "layer_types names sliding_attention, but sliding_window is null or use_sliding_window false"
            )
    return (window, tuple(sliding)) if window is not None and len(sliding) else (None, ())


def _rope(fields: JsonFields, max_position_embeddings: int) -> tuple[float, Llama3Scaling | None]:
    """Rotary base and scaling: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters` for both."""
    scaling = fields.table("rope_scaling") or fields.table("rope_parameters")
    for table in (fields, scaling):
        if table is not None and table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise fields.error(f"partial_rotary_factor {shown(table.get('partial_rotary_factor'))} is not supported")
    theta = fields.number("rope_theta", _ROPE_THETA, within=_ROPE_THETA_RANGE)
    if scaling is None:
        return theta, None
    theta = scaling.number("rope_theta", theta, within=_ROPE_THETA_RANGE)
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error(
            f"rope type {shown(rope_type)} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if rope_type == "default":
        return theta, None
    low = scaling.number("low_freq_factor", within=_ROPE_FACTOR_RANGE)
    high = scaling.number("high_freq_factor", within=_ROPE_FACTOR_RANGE)
    if low >= high:
        raise fields.error(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return theta, Llama3Scaling(
        factor=scaling.number("factor", within=_ROPE_FACTOR_RANGE),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=scaling.integer(
            "original_max_position_embeddings", max_position_embeddings, most=_MAX_POSITIONS
        ),
    )


def _eos_token_ids(config: JsonFields, vocab_size: int) -> frozenset[int]:
    """The union over both files: chat models add their end-of-turn id in either one."""
    sources = [config]
    generation_path = config.path.with_name("generation_config.json")
    if generation_path.exists():
        sources.append(JsonFields(generation_path))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise source.error(f"eos_token_id {shown(value)} is neither an integer nor a list of integers")
            if not 0 <= token_id < vocab_size:
                raise source.error(f"eos_token_id {shown(token_id)} is outside the vocabulary of {vocab_size} tokens")
            ids.add(token_id)
    return frozenset(ids)
