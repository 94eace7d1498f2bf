"""Heads that come with the program, found by the target's weights: its name may be any."""

from __future__ import annotations

from pathlib import Path

from backend.errors import ConfigError
from backend.models.sources import ModelSource
from backend.spec_decode.heads.head_config import HeadKind, read_head_config
from backend.spec_decode.heads.target import target_fingerprint

SHIPPED = Path(__file__).with_name("shipped")  # a folder for each head


def shipped_head(kind: HeadKind, source: ModelSource) -> Path:
    """The folder of the head that comes for this target. Raises `ConfigError`, naming how to train one, where none does."""
    fingerprint = target_fingerprint(source)
    for folder in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else ():
        config = read_head_config(folder)
        if config.kind == kind and config.target_fingerprint == fingerprint:
            return folder
    raise ConfigError(
        f"no {kind} head comes for {source.name}; train one with: servelab heads train --kind {kind} "
        f"--model {source.name} --self-generated -o DIR"
    )
