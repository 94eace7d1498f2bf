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
from array import array
from collections.abc import Callable, Iterable
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

    encode: Callable[[], bytes]
    first_step: int
    last_step: int


class StepLedger:
    """Collects steps in the engine's thread. `append` only extends columns; who wants a chunk's bytes encodes them."""

    def __init__(self) -> None:
        self._columns = _Columns()

    @property
    def num_steps(self) -> int:
        """Steps since the last chunk."""
        return len(self._columns.steps)

    def append(
        self, step: int, request_ids: Iterable[str], num_scheduled_tokens: Iterable[int], kinds: Iterable[StepKind]
    ) -> LedgerChunk | None:
        """Add a step's entries, column by column, in batch order. Gives the chunk that is full now."""
        columns = self._columns
        before = len(columns.kinds)
        columns.id_indices.extend(map(columns.ids.__getitem__, request_ids))
        columns.num_scheduled_tokens.extend(num_scheduled_tokens)
        columns.kinds.extend(map(_KIND_CODES.__getitem__, kinds))
        columns.steps.append(step)
        columns.counts.append(len(columns.kinds) - before)
        return self.flush() if len(columns.steps) >= STEPS_PER_CHUNK else None

    def flush(self) -> LedgerChunk | None:
        """The steps since the last chunk, which are forgotten here; None when there are none."""
        columns = self._columns
        if not columns.steps:
            return None
        self._columns = _Columns()
        return LedgerChunk(columns.encode, columns.steps[0], columns.steps[-1])


class _IdTable(dict[str, int]):
    """Numbers ids in the order in which they are first asked for."""

    def __missing__(self, request_id: str) -> int:
        self[request_id] = index = len(self)
        return index


class _Columns:
    """A chunk's steps. Numbers are kept unboxed, so that neither keeping nor encoding them takes Python objects."""

    def __init__(self) -> None:
        self.ids = _IdTable()
        self.steps, self.counts = array("I"), array("I")
        self.id_indices, self.num_scheduled_tokens, self.kinds = array("I"), array("I"), bytearray()

    def encode(self) -> bytes:
        names = json.dumps(list(self.ids), ensure_ascii=False, separators=(",", ":")).encode()
        header = _HEADER.pack(_MAGIC, _VERSION, len(self.steps), len(self.kinds), len(names))
        columns = (self.steps, self.counts, self.id_indices, self.num_scheduled_tokens)
        numbers = (np.asarray(column).astype("<u4", copy=False).tobytes() for column in columns)
        return zlib.compress(b"".join((header, names, *numbers, self.kinds)))


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
