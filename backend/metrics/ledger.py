"""The step ledger: which requests ran in each step, with how many tokens, in compressed chunks of 256 steps.

A chunk is zlib data over, in little-endian order:

    magic "SLST" (4 bytes), version u8, num_steps u32, num_entries u32, size of the id table u32
    id table: JSON list of request ids, UTF-8
    step numbers u32 [num_steps], entries per step u32 [num_steps]
    id table index u32 [num_entries], scheduled tokens u32 [num_entries], kind u8 [num_entries]

Columns compress far better than rows: a steady batch repeats itself from step to step.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple, get_args

import numpy as np

from backend.core.output import StepKind
from backend.errors import DatabaseError

LEDGER_KIND = "steps"  # the `kind` of these chunks in `StatsSink.on_chunk`
STEPS_PER_CHUNK = 256

_KINDS: tuple[StepKind, ...] = get_args(StepKind)  # a code is the place in this order
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_HEADER = struct.Struct("<4sBIII")
_MAGIC = b"SLST"
_VERSION = 1


class LedgerEntry(NamedTuple):
    """One request's share of a step; `recompute` runs again what a preemption lost."""

    request_id: str
    num_scheduled_tokens: int
    kind: StepKind


class LedgerStep(NamedTuple):
    step: int
    entries: tuple[LedgerEntry, ...]


class LedgerChunk(NamedTuple):
    """In the order of `StatsSink.on_chunk`'s arguments after the kind."""

    data: bytes
    first_step: int
    last_step: int


class StepLedger:
    """Collects steps in the engine thread. `append` only extends lists; encoding comes once per chunk."""

    def __init__(self) -> None:
        self._clear()

    @property
    def num_steps(self) -> int:
        """Steps since the last chunk."""
        return len(self._steps)

    def append(self, step: int, entries: Iterable[tuple[str, int, StepKind]]) -> LedgerChunk | None:
        """Add a step's (request_id, num_scheduled_tokens, kind) in batch order. Gives the chunk that is full now."""
        ids, before = self._id_index, len(self._tokens)
        for request_id, num_tokens, kind in entries:
            self._ids.append(ids.setdefault(request_id, len(ids)))
            self._tokens.append(num_tokens)
            self._kinds.append(_KIND_CODES[kind])
        self._steps.append(step)
        self._counts.append(len(self._tokens) - before)
        return self.flush() if len(self._steps) >= STEPS_PER_CHUNK else None

    def flush(self) -> LedgerChunk | None:
        """The steps since the last chunk, which are forgotten here; None when there are none."""
        if not self._steps:
            return None
        names = json.dumps(list(self._id_index), ensure_ascii=False, separators=(",", ":")).encode()
        header = _HEADER.pack(_MAGIC, _VERSION, len(self._steps), len(self._tokens), len(names))
        columns = [np.array(c, dtype="<u4") for c in (self._steps, self._counts, self._ids, self._tokens)]
        raw = b"".join((header, names, *(column.tobytes() for column in columns), bytes(self._kinds)))
        chunk = LedgerChunk(zlib.compress(raw), self._steps[0], self._steps[-1])
        self._clear()
        return chunk

    def _clear(self) -> None:
        self._id_index: dict[str, int] = {}
        self._steps: list[int] = []
        self._counts: list[int] = []
        self._ids: list[int] = []
        self._tokens: list[int] = []
        self._kinds = bytearray()


def decode_chunk(data: bytes) -> list[LedgerStep]:
    """The steps of one chunk. Raises `DatabaseError` when it is damaged or written by a newer version."""
    try:
        raw = zlib.decompress(data)
        magic, version, num_steps, num_entries, names_size = _HEADER.unpack_from(raw)
    except (zlib.error, struct.error) as error:
        raise DatabaseError(f"the step ledger is damaged: {error}") from None
    size = _HEADER.size + names_size + 8 * num_steps + 9 * num_entries
    if magic != _MAGIC or (version == _VERSION and len(raw) != size):
        raise DatabaseError("the step ledger is damaged: its parts do not add up")
    if version != _VERSION:
        raise DatabaseError(f"the step ledger has format {version}; this version of ServeLab reads format {_VERSION}")
    offset = _HEADER.size + names_size
    ids = json.loads(raw[_HEADER.size : offset])
    columns = np.frombuffer(raw, dtype="<u4", count=2 * num_steps + 2 * num_entries, offset=offset)
    steps, counts, id_indices, tokens = np.split(columns, [num_steps, 2 * num_steps, 2 * num_steps + num_entries])
    kinds = raw[len(raw) - num_entries :]
    entries = [
        LedgerEntry(ids[index], num_tokens, _KINDS[kind])
        for index, num_tokens, kind in zip(id_indices.tolist(), tokens.tolist(), kinds, strict=True)
    ]
    ends = np.cumsum(counts).tolist()
    return [
        LedgerStep(step, tuple(entries[end - count : end]))
        for step, count, end in zip(steps.tolist(), counts.tolist(), ends, strict=True)
    ]
