"""`DataFolder`: conversations on disk, a part at a time, so that writing them can stop between two parts and go on later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from backend.errors import ConfigError, ModelError
from backend.spec_decode.heads.training_data import Conversation

_NOTE = "data.json"


class DataFolder:
    """Parts are numbered from 0; each is written whole or not at all."""

    def __init__(self, path: Path, made_by: Mapping[str, Any]) -> None:
        """Args:
            made_by: what decides the conversations, JSON-safe.
        Raises:
            ConfigError: the folder has conversations of another making.
            ModelError: it cannot be read or written.
        """
        self.path, self.made_by = path, dict(made_by)
        note = path / _NOTE
        try:
            path.mkdir(parents=True, exist_ok=True)
            if note.exists():
                found = json.loads(note.read_text(encoding="utf-8"))
                _check_same(path, found, json.loads(json.dumps(made_by)))
            else:
                note.write_text(json.dumps(made_by, indent=2) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be used: {getattr(error, 'strerror', None) or error}") from None
        self._num_tokens = [len(part["token_ids"]) for part in self._parts()]

    @property
    def num_parts(self) -> int:
        return len(self._num_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self._num_tokens)

    def append(self, conversations: Sequence[Conversation]) -> None:
        """Write the next part. Raises `ModelError` where it cannot be written."""
        token_ids = np.concatenate([conversation.token_ids for conversation in conversations])
        is_answer = np.concatenate([conversation.is_answer for conversation in conversations])
        narrow = np.uint16 if token_ids.max(initial=0) < 2**16 else np.int32
        tensors = {
            "token_ids": token_ids.astype(narrow),
            "is_answer": np.packbits(is_answer),
            "lengths": np.array([len(conversation.token_ids) for conversation in conversations], dtype=np.int32),
            "is_greedy": np.array([conversation.is_greedy for conversation in conversations], dtype=np.uint8),
        }
        path = self._part(self.num_parts)
        unfinished = path.with_suffix(".unfinished")
        try:
            save_file(tensors, unfinished)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
        self._num_tokens.append(len(token_ids))

    def read(self, num_tokens: int) -> list[Conversation]:
        """The conversations of the first parts that together have so many tokens, or of all."""
        conversations, total = [], 0
        for part in self._parts():
            if total >= num_tokens:
                break
            token_ids = part["token_ids"].astype(np.int32)
            is_answer = np.unpackbits(part["is_answer"], count=len(token_ids)).astype(bool)
            total += len(token_ids)
            ends = np.cumsum(part["lengths"])[:-1]
            pieces = zip(np.split(token_ids, ends), np.split(is_answer, ends), part["is_greedy"], strict=True)
            conversations += [Conversation(ids, answer, bool(greedy)) for ids, answer, greedy in pieces]
        return conversations

    def _parts(self) -> list[dict[str, Any]]:
        parts = []
        while (path := self._part(len(parts))).exists():
            try:
                parts.append(load_file(path))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} is damaged ({error}); remove {self.path} to start afresh") from None
        return parts

    def _part(self, number: int) -> Path:
        return self.path / f"conversations-{number:04}.safetensors"


def _check_same(path: Path, found: Any, wanted: dict[str, Any]) -> None:
    if found == wanted:
        return
    names = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
    raise ConfigError(f"{path} has conversations of another {', '.join(names) or 'version'}; name another folder")
