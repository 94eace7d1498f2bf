"""`DecoderConfig`: what the generic decoder needs to know of a model, read from a checkpoint's config.json.

Read as plain JSON: importing this takes neither torch nor transformers. A feature that the decoder does not have is
refused by name, never ignored.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE_TYPES = ("default", "llama3")

# transformers' defaults for a Llama config that leaves the key out.
_LLAMA_ROPE_THETA = 10000.0
_LLAMA_RMS_NORM_EPS = 1e-6
_LLAMA_MAX_POSITION_EMBEDDINGS = 2048

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

_shown = reprlib.Repr()  # a foreign file's value in an error line, whatever its size and depth
_shown.maxstring = _shown.maxother = 80


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

    def count_parameters(self) -> int:
        """Number of weights, biases and norm scales; a tied head counts once, with the embedding."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (query_size + kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        attention_biases = query_size + 2 * kv_size + self.hidden_size if self.attention_bias else 0
        mlp_biases = 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        layer = attention + mlp + norms + attention_biases + mlp_biases
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def load_decoder_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json and, for further EOS ids, generation_config.json.

    Raises:
        ModelError: a file is missing or malformed, or the model needs something the decoder does not have.
    """
    fields = _Fields(folder / "config.json")
    architecture = _architecture(fields)
    fields.refuse("quantization_config", "quantized checkpoints are")
    fields.refuse("sliding_window", "attention windows are")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error(f"hidden_act {_shown.repr(activation)} is not supported; allowed: silu")

    vocab_size = fields.integer("vocab_size", most=_MAX_VOCAB_SIZE)
    hidden_size = fields.integer("hidden_size", most=_MAX_HIDDEN_SIZE)
    num_heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, most=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", hidden_size // num_heads, most=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd: rotary embedding turns pairs")
    max_position_embeddings = fields.integer(
        "max_position_embeddings", _LLAMA_MAX_POSITION_EMBEDDINGS, least=2, most=_MAX_POSITIONS
    )  # a prompt and an output have a token each
    rope_theta, rope_scaling = _rope(fields, max_position_embeddings)

    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", most=_MAX_INTERMEDIATE_SIZE),
        num_layers=fields.integer("num_hidden_layers", most=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", _LLAMA_RMS_NORM_EPS, within=_RMS_NORM_EPS_RANGE),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        eos_token_ids=_eos_token_ids(fields, vocab_size),
        checkpoint_dtype=fields.text("dtype", fields.text("torch_dtype", "unknown")),
    )


class _Fields:
    """A JSON object whose values are checked as they are read; a null counts as absent, as in transformers."""

    def __init__(self, path: Path, data: dict[str, Any] | None = None) -> None:
        self.path = path
        self.data = _read_json_object(path) if data is None else data

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def refuse(self, key: str, what: str) -> None:
        if self.get(key) is not None:
            raise self.error(f"{key} is set, and {what} not supported")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{key} {_shown.repr(value)} is not an integer from {least} to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, *, within: tuple[float, float]) -> float:
        value = self._present(key, default)
        least, most = within
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{key} {_shown.repr(value)} is not a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} {_shown.repr(value)} is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} {_shown.repr(value)} is not a string")
        return value

    def table(self, key: str) -> _Fields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} {_shown.repr(value)} is not an object")
        return _Fields(self.path, value)

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model folder holds config.json and safetensors files") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not readable as JSON ({getattr(error, 'strerror', None) or error})") from None
    except RecursionError:
        raise ModelError(f"{path}: not readable as JSON (nested too deeply)") from None
    except ValueError:
        raise ModelError(f"{path}: not readable as JSON (a number has thousands of digits)") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: holds {type(data).__name__}, not a JSON object")
    return data


def _architecture(fields: _Fields) -> str:
    named = fields.get("architectures")
    supported = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    if not isinstance(named, list) or not named:
        raise fields.error(f"names no architecture; {supported}")
    if named[0] not in SUPPORTED_ARCHITECTURES:
        raise fields.error(f"architecture {_shown.repr(named[0])} is not supported; {supported}")
    return named[0]


def _rope(fields: _Fields, max_position_embeddings: int) -> tuple[float, Llama3Scaling | None]:
    """Rotary base and scaling: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters` for both."""
    scaling = fields.table("rope_scaling") or fields.table("rope_parameters")
    for table in (fields, scaling):
        if table is not None and table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise fields.error(
                f"partial_rotary_factor {_shown.repr(table.get('partial_rotary_factor'))} is not supported"
            )
    theta = fields.number("rope_theta", _LLAMA_ROPE_THETA, within=_ROPE_THETA_RANGE)
    if scaling is None:
        return theta, None
    theta = scaling.number("rope_theta", theta, within=_ROPE_THETA_RANGE)
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error(
            f"rope type {_shown.repr(rope_type)} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
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


def _eos_token_ids(config: _Fields, vocab_size: int) -> frozenset[int]:
    """The union over both files: chat models add their end-of-turn id in either one."""
    sources = [config]
    generation_path = config.path.with_name("generation_config.json")
    if generation_path.exists():
        sources.append(_Fields(generation_path))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise source.error(f"eos_token_id {_shown.repr(value)} is neither an integer nor a list of integers")
            if not 0 <= token_id < vocab_size:
                raise source.error(
                    f"eos_token_id {_shown.repr(token_id)} is outside the vocabulary of {vocab_size} tokens"
                )
            ids.add(token_id)
    return frozenset(ids)
