"""The models that can be sized: presets, those that are here, a folder, a pasted config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.components.sizing_state import PASTED
from backend.analysis.attention_shape import config_of_decoder
from backend.analysis.presets import MODEL_PRESETS
from backend.errors import ModelError
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import load_decoder_config
from backend.models.sources import list_models, resolve_source

MAX_CONFIG_CHARS = 200_000  # of a config.json; published ones have a few thousand


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A config as `backend.analysis` reads it, and where it is from."""

    config: Mapping[str, Any]
    source: str


def local_names() -> list[str]:
    """Models that are here: pulled, added, or made up of random weights."""
    return [model.name for model in list_models() if model.state in ("ready", "built in")]


def sized_model(name: str, config_text: str = "") -> SizedModel:
    """The model of that name; `config_text` is the pasted config.

    Raises:
        ModelError: there is none of that name, or its files are damaged.
        ValueError: the pasted text, or a folder's config.json, is no JSON object.
    """
    if name == PASTED:
        return SizedModel(read_config(config_text), "pasted config.json")
    if name in MODEL_PRESETS:
        return SizedModel(MODEL_PRESETS[name].config, MODEL_PRESETS[name].source)
    folder = _folder(name)
    if folder is not None and name not in local_names():
        # Wider than what the engine can load: any family that can be sized.
        try:
            return SizedModel(
                read_config((folder / "config.json").read_text(encoding="utf-8")), f"{folder}/config.json"
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{folder}/config.json cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
    source = resolve_source(name)
    if source.path is None:
        return SizedModel(config_of_decoder(DUMMY_SHAPES[source.shape or ""]), "a shape of ServeLab's, random weights")
    return SizedModel(config_of_decoder(load_decoder_config(source.path)), "the files on this machine")


def read_config(text: str) -> dict[str, Any]:
    """A config.json as a dictionary. Raises ValueError, naming the place where it stops being one."""
    if len(text) > MAX_CONFIG_CHARS:
        raise ValueError(f"the config has {len(text):,} characters; at most {MAX_CONFIG_CHARS:,} are read")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("not readable as JSON: nested too deeply") from None
    except ValueError:
        raise ValueError("not readable as JSON: a number has thousands of digits") from None
    if not isinstance(config, dict):
        raise ValueError(f"a model config is a JSON object, not {type(config).__name__}")
    return config


def _folder(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.absolute() if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None
