"""How a chunk of the step ledger is written, and read again.

A chunk is zlib data over, in little-endian order:

    magic "SLST" (4 bytes), version u8
    num_steps u32, num_entries u32, num_events u32, num_block_ids u32, num_lists u32, size of the id table u32
    id table: JSON list of request ids, UTF-8
    u32 columns, one after the other:
        step numbers [num_steps], entries per step [num_steps], events per step [num_steps]
        of an entry: id table index, scheduled tokens [num_entries each]
        of an event: id table index + 1 or 0 for none, number of block ids, tokens [num_events each]
        of a list of the key frame: id table index + 1, or 0 for the cached blocks; number of block ids; tokens of the
        request + 1, or 0 where they are not known [num_lists each]
        block ids [num_block_ids]: those of the events, then those of the lists, each as its difference from the one before
        it, modulo 2**32; cached blocks ascend
    u8 columns: kind of an entry [num_entries]; kind of an event, KV group of an event [num_events each]; KV group of a list
        of the key frame [num_lists]; 1 where there is a key frame, else 0

With speculation, an entry's tokens are those whose KV its step leaves behind: drafts that were accepted, not the rejected ones.

Columns compress far better than rows: a steady batch repeats itself from step to step. So do differences of block ids: a
pool hands out runs of them, and most of a full cache are neighbours.

Version 3 had block ids as they are, cached ones in any order, and no tokens of lists. Version 2 had no tokens of events
either. Version 1 had neither events nor key frames: three counts in its header (steps, entries, size of the id table), columns
without those of events and lists.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from itertools import chain, islice
from typing import NamedTuple, get_args

import numpy as np

from backend.core.block_events import BlockEvent, BlockEventKind, PoolState
from backend.core.output import StepKind
from backend.errors import DatabaseError

STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)  # a code is the place in this order
STEP_KIND_CODES = {kind: code for code, kind in enumerate(STEP_KINDS)}
_DECODE = bytes([STEP_KIND_CODES["decode"]])
EVENT_KINDS: tuple[BlockEventKind, ...] = get_args(BlockEventKind)  # likewise
EVENT_KIND_CODES = {kind: code for code, kind in enumerate(EVENT_KINDS)}
_OF_THE_POOL = frozenset({"cache", "evict", "uncache"})  # kinds of events that need no request

_MAGIC = b"SLST"
_VERSION = 4
_START = struct.Struct("<4sB")
_COUNTS = {1: struct.Struct("<III")} | dict.fromkeys((2, 3, 4), struct.Struct("<IIIIII"))


class LedgerEntry(NamedTuple):
    """One request's share of a step; `recompute` runs again what a preemption lost."""

    request_id: str
    num_scheduled_tokens: int
    kind: StepKind


class LedgerStep(NamedTuple):
    """`events` are those since the step before, up to the moment at which this one was handed to the worker."""

    step: int
    entries: tuple[LedgerEntry, ...]
    events: tuple[BlockEvent, ...] = ()


class LedgerSegment(NamedTuple):
    """What a chunk holds; `key_frame` is the pool after the events of its first step, where it was written."""

    steps: list[LedgerStep]
    key_frame: PoolState | None


class _BlockList(NamedTuple):
    """Of a key frame."""

    request_id: str | None  # None for the cached blocks
    group: int
    block_ids: list[int]
    num_tokens: int | None  # of the request, where it is known


class IdTable(dict[str, int]):
    """Numbers ids in the order in which they are first asked for."""

    def __missing__(self, request_id: str) -> int:
        self[request_id] = index = len(self)
        return index


class Columns:
    """A chunk's steps. Numbers are kept unboxed, so that neither keeping nor encoding them takes Python objects."""

    def __init__(self) -> None:
        self.ids = IdTable()
        self.steps, self.counts, self.event_counts = array("I"), array("I"), array("I")
        self.id_indices, self.num_scheduled_tokens, self.kinds = array("I"), array("I"), bytearray()
        self.events: list[BlockEvent] = []  # nobody changes them: laid out only when the chunk is encoded
        self.key_frame: PoolState | None = None
        self._last_ids: list[str] = []  # of the entries added last, and what they are in `id_indices`
        self._last_indices = array("I")

    def add_entries(self, request_ids: list[str], num_scheduled_tokens: list[int], kinds: list[StepKind]) -> None:
        """Those of one step. In most, the requests are those of the step before, and each decodes a token."""
        if request_ids != self._last_ids:
            self._last_ids = request_ids
            self._last_indices = array("I", map(self.ids.__getitem__, request_ids))
        self.id_indices.extend(self._last_indices)
        num_entries = len(kinds)
        if num_scheduled_tokens.count(1) == num_entries:
            self.num_scheduled_tokens.extend(array("I", (1,)) * num_entries)
        else:
            self.num_scheduled_tokens.fromlist(num_scheduled_tokens)
        if kinds.count("decode") == num_entries:
            self.kinds.extend(_DECODE * num_entries)
        else:
            self.kinds.extend(map(STEP_KIND_CODES.__getitem__, kinds))
        self.counts.append(num_entries)

    def encode(self) -> bytes:
        lists = _lists_of(self.key_frame)
        # Column by column rather than event by event: that holds the interpreter, which the step loop needs, half as long.
        event_kinds, event_ids, groups, event_blocks, tokens = (
            zip(*self.events, strict=True) if self.events else [()] * 5
        )
        owners = array("I", [self._owner(request_id) for request_id in event_ids])
        list_owners = array("I", [self._owner(each.request_id) for each in lists])
        list_tokens = array("I", [0 if each.num_tokens is None else each.num_tokens + 1 for each in lists])
        event_sizes = array("I", map(len, event_blocks))
        event_tokens = array("I", tokens)
        list_sizes = array("I", [len(each.block_ids) for each in lists])
        block_ids = array("I", list(chain.from_iterable(event_blocks)))
        for each in lists:
            block_ids.extend(each.block_ids)
        names = json.dumps(list(self.ids), ensure_ascii=False, separators=(",", ":")).encode()
        sizes = (len(self.steps), len(self.kinds), len(self.events), len(block_ids), len(lists), len(names))
        columns = (self.steps, self.counts, self.event_counts, self.id_indices, self.num_scheduled_tokens)
        differences = np.diff(np.asarray(block_ids, dtype=np.uint32), prepend=np.uint32(0))
        columns += (owners, event_sizes, event_tokens, list_owners, list_sizes, list_tokens, differences)
        numbers = (np.asarray(column).astype("<u4", copy=False).tobytes() for column in columns)
        codes = (
            bytes(map(EVENT_KIND_CODES.__getitem__, event_kinds)),
            bytes(groups),
            bytes(each.group for each in lists),
            bytes([self.key_frame is not None]),
        )
        head = _START.pack(_MAGIC, _VERSION) + _COUNTS[_VERSION].pack(*sizes)
        return zlib.compress(b"".join((head, names, *numbers, self.kinds, *codes)))

    def _owner(self, request_id: str | None) -> int:
        return 0 if request_id is None else self.ids[request_id] + 1


def read_chunk(data: bytes) -> LedgerSegment:
    """One chunk. Raises `DatabaseError` when it is damaged or written by a newer version."""
    try:
        return _decoded(data)
    except (TypeError, zlib.error, struct.error) as error:  # no bytes, or none that `Columns` has written
        raise DatabaseError(f"the step ledger is damaged: {error}") from None
    except (IndexError, ValueError, RecursionError):
        raise DatabaseError("the step ledger is damaged: its parts do not fit together") from None


def _decoded(data: bytes) -> LedgerSegment:
    raw = zlib.decompress(data)
    magic, version = _START.unpack_from(raw)
    if magic == _MAGIC and version not in _COUNTS:
        raise DatabaseError(
            f"the step ledger has format {version}; this version of ServeLab reads formats 1 to {_VERSION}"
        )
    counts = list(_COUNTS.get(version, _COUNTS[1]).unpack_from(raw, _START.size))
    if version == 1:
        counts[2:2] = [0, 0, 0]
    num_steps, num_entries, num_events, num_block_ids, num_lists, names_size = counts
    with_events = version > 1
    widths = [num_steps] * (3 if with_events else 2) + [num_entries] * 2
    widths += [num_events] * (3 if version > 2 else 2) + [num_lists] * (3 if version > 3 else 2) + [num_block_ids]
    num_codes = num_entries + 2 * num_events + num_lists + with_events
    offset = _START.size + _COUNTS[version].size if magic == _MAGIC else 0
    if magic != _MAGIC or len(raw) != offset + names_size + 4 * sum(widths) + num_codes:
        raise DatabaseError("the step ledger is damaged: its parts do not add up")
    ids: list[str] = json.loads(raw[offset : offset + names_size])
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise ValueError("ids are strings")
    numbers = np.frombuffer(raw, dtype="<u4", count=sum(widths), offset=offset + names_size)
    *columns, block_ids = np.split(numbers, np.cumsum(widths)[:-1])
    if version > 3:
        block_ids = np.cumsum(block_ids, dtype=np.uint32)
    columns = [column.tolist() for column in columns]
    if not with_events:
        columns.insert(2, [0] * num_steps)
    if version < 3:
        columns.insert(7, [0] * num_events)
    if version < 4:
        columns.append([0] * num_lists)
    steps, counts, event_counts, id_indices, tokens, *columns = columns
    owners, event_sizes, event_tokens, list_owners, list_sizes, list_tokens = columns
    sums = (sum(counts), sum(event_counts), sum(event_sizes) + sum(list_sizes))
    if sums != (num_entries, num_events, num_block_ids):
        raise ValueError(f"sums {sums}")
    codes = raw[len(raw) - num_codes :]
    entries = [
        LedgerEntry(ids[index], num_tokens, STEP_KINDS[kind])
        for index, num_tokens, kind in zip(id_indices, tokens, codes[:num_entries], strict=True)
    ]
    blocks = iter(block_ids.tolist())
    names = [None, *ids]
    kinds, groups, list_groups = (
        codes[num_entries + begin : num_entries + begin + count]
        for begin, count in ((0, num_events), (num_events, num_events), (2 * num_events, num_lists))
    )
    events = [
        BlockEvent(EVENT_KINDS[kind], names[owner], group, list(islice(blocks, size)), num_tokens)
        for kind, owner, group, size, num_tokens in zip(kinds, owners, groups, event_sizes, event_tokens, strict=True)
    ]
    if any(event.request_id is None and event.kind not in _OF_THE_POOL for event in events):
        raise ValueError("an event is of no request")
    lists = [
        _BlockList(names[owner], group, list(islice(blocks, size)), num_tokens - 1 if num_tokens else None)
        for owner, group, size, num_tokens in zip(list_owners, list_groups, list_sizes, list_tokens, strict=True)
    ]
    ends, event_ends = np.cumsum(counts).tolist(), np.cumsum(event_counts).tolist()
    return LedgerSegment(
        [
            LedgerStep(step, tuple(entries[end - count : end]), tuple(events[event_end - event_count : event_end]))
            for step, count, end, event_count, event_end in zip(
                steps, counts, ends, event_counts, event_ends, strict=True
            )
        ],
        _state_of(lists) if with_events and codes[-1] else None,
    )


def _lists_of(state: PoolState | None) -> list[_BlockList]:
    if state is None:
        return []
    held = [
        _BlockList(request_id, group, blocks, state.num_tokens.get(request_id))
        for request_id, groups in state.held.items()
        for group, blocks in enumerate(groups)
    ]
    return [*held, _BlockList(None, 0, sorted(state.cached), None)]


def _state_of(lists: list[_BlockList]) -> PoolState:
    held, cached, tokens = {}, [], {}
    for request_id, _, blocks, num_tokens in lists:
        if request_id is None:
            cached.extend(blocks)
            continue
        held.setdefault(request_id, []).append(blocks)
        if num_tokens is not None:
            tokens[request_id] = num_tokens
    return PoolState(held, cached, tokens)
