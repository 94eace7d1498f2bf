"""Heads that come with the program, found by the target's weights: its name may be any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from backend.errors import ConfigError
from backend.models.sources import ModelSource
from backend.spec_decode.heads.head_config import HeadConfig, HeadKind, read_head_config

SHIPPED = Path(__file__).with_name("shipped")  # a folder for each head


def shipped_head(kind: HeadKind, source: ModelSource) -> Path:
    """The folder of the head that comes for this target. Raises `ConfigError`, naming how to train one, where none does."""
    from backend.spec_decode.heads.target import target_fingerprint  # with torch, which a look by name does without

    fingerprint = target_fingerprint(source)
    for folder, config in _heads(kind):
        if config.target_fingerprint == fingerprint:
            return folder
    raise _none_comes(kind, source.name)


def check_comes_by_name(kind: HeadKind, target: str) -> None:
    """Raise the same for a model that is still to be fetched, where no head was trained for one of that name."""
    if not any(config.target == target for _, config in _heads(kind)):
        raise _none_comes(kind, target)


def _heads(kind: HeadKind) -> Iterator[tuple[Path, HeadConfig]]:
    for folder in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else ():
        config = read_head_config(folder)
        if config.kind == kind:
            yield folder, config


def _none_comes(kind: HeadKind, target: str) -> ConfigError:
    return ConfigError(
        f"no {kind} head comes for {target}; train one with: servelab heads train --kind {kind} --model {target} "
        "--self-generated -o DIR"
    )
