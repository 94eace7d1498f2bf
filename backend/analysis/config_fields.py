"""The sizes in a Hugging Face config.json, whatever a family calls them, checked as they are read.

Wider than `backend.models.model_config`, which reads what the decoder can run: here a model need only be sized.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

# Far above any size there is; beyond it a file is damaged or hostile.
MAX_SIZE = 2**24
MAX_LAYERS = 2**12  # what is read is looked at layer by layer

_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "sliding_window_pattern": ("_sliding_window_pattern",),
    "dtype": ("torch_dtype",),
}

_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

# What transformers assumes where a config leaves the key out, for the keys that published configs do leave out. Multimodal
# Gemma 3 leaves out all that its 4B text model does not change.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8},
    "qwen2": {"num_key_value_heads": 32} | _QWEN_WINDOW,
    "qwen2_moe": {"num_key_value_heads": 16, "decoder_sparse_step": 1, "qkv_bias": True} | _QWEN_WINDOW,
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128} | _QWEN_WINDOW,
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "gemma": {"num_key_value_heads": 16} | _GEMMA,
    "gemma2": {"num_key_value_heads": 4, "sliding_window": 4096} | _GEMMA,
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    | _GEMMA,
    "gpt2": {"max_position_embeddings": 1024, "tie_word_embeddings": True},
    "falcon": {"multi_query": True, "parallel_attn": True, "tie_word_embeddings": True},
    "phi": {},
    "phi3": {},
    "deepseek_v2": {"n_shared_experts": 2, "first_k_dense_replace": 0} | _MLA,
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3} | _MLA,
}

# Keys under which an explicit null says "none" instead of "the default".
_NULL_MEANS_NONE = {"sliding_window", "q_lora_rank"}

_shown = reprlib.Repr()  # a foreign file's value in an error line, whatever its size and depth
_shown.maxstring = _shown.maxother = 80


class ConfigFields:
    """A config.json as a dictionary; the language model's part of it where it is nested under `text_config`.

    Raises:
        ValueError: it is no object, or names no `model_type`. So do all readers, naming the field and what it may be.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ValueError(f"a model config is a JSON object, not {type(config).__name__}")
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise ValueError(f"text_config {_shown.repr(nested)} is not an object")
        self._outer = config
        self._data = config if nested is None else nested
        self._defaults: dict[str, Any] = {}
        self.model_type = self.text("model_type")
        self._defaults = DEFAULTS.get(self.model_type, {})

    def get(self, name: str, default: Any = None) -> Any:
        """The value under `name` or another family's name for it; else the family's default; else `default`.

        Of `text_config` and the object around it the inner one counts, for the dtype and the tied head the outer one:
        they belong to the whole model.
        """
        objects = [self._data]
        if self._data is not self._outer and name in ("dtype", "tie_word_embeddings"):
            objects.insert(0, self._outer)
        for data in objects:
            for key in (name, *_ALIASES.get(name, ())):
                if data.get(key) is not None:
                    return data[key]
                if key in data and key in _NULL_MEANS_NONE:
                    return None
        return self._defaults.get(name, default)

    def has(self, name: str) -> bool:
        """Whether the file itself gives the field a value."""
        return self._data.get(name) is not None

    def anywhere(self, name: str) -> bool:
        """The same of the whole file, where towers for other modalities are described too; a zero is no value."""
        return bool(self._data.get(name) or self._outer.get(name))

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self._present(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{name} {_shown.repr(value)} is not an integer from {least} to {most:,}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} {_shown.repr(value)} is neither true nor false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise ValueError(f"{name} {_shown.repr(value)} is not a string")
        return value

    def items(self, name: str, kind: type) -> list[Any] | None:
        """A list of `kind`, or None where the config has none."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list | tuple) and all(type(item) is kind for item in value)):
            raise ValueError(f"{name} {_shown.repr(value)} is not a list of {kind.__name__}")
        return None if value is None else list(value)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            also = _ALIASES.get(name, ())
            raise ValueError(
                f"{name} is missing from the model config" + (f" (also {', '.join(also)})" if also else "")
            )
        return value
