"""`HeadConfig`: what a head's config.json says. Read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backend.errors import ConfigError, ModelError
from backend.models.json_fields import JsonFields, shown

HeadKind = Literal["eagle", "medusa"]
KINDS: tuple[HeadKind, ...] = ("eagle", "medusa")
CONFIG_NAME = "config.json"

_MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """
    Attributes:
        target: the model it was trained for, by the name it had.
        target_fingerprint: of `backend.spec_decode.heads.target.target_fingerprint`.
        num_speculative_tokens: tokens ahead that it was trained for; a Medusa has as many heads.
        feature_layers: behind which layers of the target an EAGLE head takes hidden states, ascending.
        draft_vocab_size: tokens that it can draft.
        training: how it was made and what it reached, for people to read.
    """

    kind: HeadKind
    target: str
    target_fingerprint: str
    num_speculative_tokens: int
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    training: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def refuse_head(model: str) -> None:
    """Raise `ConfigError` where what is named as a draft model is the folder of a head."""
    path = Path(model).expanduser() / CONFIG_NAME
    if not path.is_file():
        return
    fields = JsonFields(path)
    kind = fields.get("kind")
    if kind in KINDS and fields.has("target_fingerprint"):
        raise ConfigError(
            f"speculative.model = {model!r} holds a head of kind {kind}: it goes with speculative.method = {kind!r}, and not "
            "with 'draft_model'"
        )


def named_head(kind: HeadKind, model: str) -> Path:
    """The folder that `speculative.model` names for a head of that kind.

    Raises `ConfigError` where its head is of another kind, and as `read_head_config`.
    """
    folder = Path(model).expanduser()
    found = read_head_config(folder).kind
    if found != kind:
        raise ConfigError(
            f"speculative.model = {model!r} holds a head of kind {found}: it goes with speculative.method = {found!r}, and not "
            f"with {kind!r}"
        )
    return folder


def read_head_config(folder: Path) -> HeadConfig:
    """Raises `ModelError` for a folder that holds no head or an untrained one, or one with values that cannot be."""
    if not (folder / CONFIG_NAME).is_file():
        raise ModelError(
            f"{folder} holds no draft head: {CONFIG_NAME} is missing; one is made by: servelab heads train"
        )
    fields = JsonFields(folder / CONFIG_NAME)
    kind = fields.text("kind", "none")
    if kind not in KINDS:
        raise fields.error(f"kind {shown(kind)} is no draft head's; allowed: {', '.join(KINDS)}")
    layers = fields.get("feature_layers")
    if not isinstance(layers, list) or not all(type(layer) is int and layer > 0 for layer in layers):
        raise fields.error(f"feature_layers {shown(layers)} is not a list of positive integers")
    if layers != sorted(set(layers)) or bool(layers) != (kind == "eagle"):
        raise fields.error(f"feature_layers {shown(layers)} is not an ascending list, or not empty as a Medusa's is")
    training = fields.get("training")
    if isinstance(training, dict) and training.get("steps_done") == 0:
        raise ModelError(f"{folder} holds a head that is not trained yet; go on with: servelab heads train -o {folder}")
    return HeadConfig(
        kind=kind,
        target=fields.text("target", "unknown"),
        target_fingerprint=fields.text("target_fingerprint", ""),
        num_speculative_tokens=fields.integer("num_speculative_tokens", most=_MAX_STEPS),
        feature_layers=tuple(layers),
        draft_vocab_size=fields.integer("draft_vocab_size", most=2**22),
        training=training if isinstance(training, dict) else {},
    )
