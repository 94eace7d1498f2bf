"""The step ledger: what goes in comes out, in few bytes, and damage is named."""

from __future__ import annotations

import random
import struct
import zlib
from typing import NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.block_events import BlockEvent, BlockEventKind, PoolState
from backend.core.block_hash import prefix_key
from backend.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from backend.core.output import ModelRunnerOutput, StepKind
from backend.core.scheduler import Scheduler
from backend.errors import DatabaseError
from backend.metrics.ledger import KEY_FRAME_STEPS, LedgerChunk, StepLedger
from backend.metrics.ledger_format import EVENT_KINDS, LedgerEntry, LedgerSegment, LedgerStep, read_chunk
from backend.request import Request
from backend.sampling_params import SamplingParams

Entry = tuple[str, int, StepKind]
_NUMBER = st.integers(0, 2**32 - 1)
_BLOCKS = st.lists(_NUMBER, max_size=5)
_OF_THE_POOL: list[BlockEventKind] = ["cache", "evict", "uncache"]
_EVENTS = st.lists(
    st.builds(
        BlockEvent,
        st.sampled_from(get_args(BlockEventKind)),
        st.text(max_size=8),
        st.integers(0, 255),
        _BLOCKS,
        _NUMBER,
    )
    | st.builds(BlockEvent, st.sampled_from(_OF_THE_POOL), st.none(), st.integers(0, 255), _BLOCKS, _NUMBER),
    max_size=4,
)
_HELD = st.dictionaries(st.text(max_size=8), st.lists(_BLOCKS, min_size=1, max_size=3), max_size=4)
_TOKENS = st.none() | st.integers(0, 2**32 - 2)  # of a request: maybe nobody knows


@st.composite
def _states(draw: st.DrawFn) -> PoolState:
    held = draw(_HELD)
    tokens = {key: number for key in held if (number := draw(_TOKENS)) is not None}
    return PoolState(held, draw(st.lists(_NUMBER, max_size=5, unique=True)), tokens)


_ENTRIES = st.lists(
    st.tuples(st.text(max_size=8), st.integers(0, 2**32 - 1), st.sampled_from(["prefill", "decode", "recompute"])),
    max_size=6,
)


def append(ledger: StepLedger, step: int, entries: list[Entry]) -> LedgerChunk | None:
    return ledger.append(step, *([entry[column] for entry in entries] for column in range(3)))  # type: ignore[misc]


@given(st.lists(st.tuples(_ENTRIES, _EVENTS), min_size=1, max_size=12), st.integers(0, 1000), st.none() | _states())
def test_round_trip(steps: list[tuple[list[Entry], list[BlockEvent]]], first: int, key_frame: PoolState | None):
    ledger = StepLedger()
    for offset, (entries, events) in enumerate(steps):
        columns = ([entry[column] for entry in entries] for column in range(3))
        frame = None if offset else key_frame
        assert ledger.append(first + offset, *columns, events, frame) is None  # type: ignore[arg-type]
    chunk = ledger.flush()
    assert chunk is not None
    assert (chunk.first_step, chunk.last_step) == (first, first + len(steps) - 1)
    expected = [
        LedgerStep(first + i, tuple(LedgerEntry(*entry) for entry in entries), tuple(events))
        for i, (entries, events) in enumerate(steps)
    ]
    if key_frame is not None:
        key_frame.cached.sort()  # a set, but in order
    assert read_chunk(chunk.encode()) == LedgerSegment(expected, key_frame)
    assert ledger.flush() is None


def test_a_key_frame_begins_a_chunk():
    ledger, frame = StepLedger(), PoolState({"r": [[1, 2]]}, [2])
    assert ledger.append(0, ["r"], [5], ["prefill"], (), frame) is None
    assert append(ledger, 1, [("r", 1, "decode")]) is None
    chunk = ledger.append(2, ["r"], [1], ["decode"], (), frame)
    assert chunk is not None
    assert (chunk.first_step, chunk.last_step) == (0, 1)
    rest = ledger.flush()
    assert rest is not None
    assert read_chunk(rest.encode()).key_frame == frame


def test_a_ledger_of_the_first_version_is_read():
    """As written by hand after its description: two steps of one request, and of two."""
    names = b'["a","b"]'
    numbers = struct.pack("<10I", 7, 8, 1, 2, 0, 0, 1, 30, 1, 5)
    data = zlib.compress(struct.pack("<4sBIII", b"SLST", 1, 2, 3, len(names)) + names + numbers + bytes([0, 1, 0]))
    assert read_chunk(data) == LedgerSegment(
        [
            LedgerStep(7, (LedgerEntry("a", 30, "prefill"),)),
            LedgerStep(8, (LedgerEntry("a", 1, "decode"), LedgerEntry("b", 5, "prefill"))),
        ],
        None,
    )


def test_a_ledger_of_the_second_version_is_read():
    """As written by hand after its description: a step with an event in it, and the pool after it."""
    names = b'["a"]'
    numbers = struct.pack("<13I", 7, 1, 1, 0, 30, 1, 2, 1, 0, 2, 1, 8, 9) + struct.pack("<3I", 8, 9, 8)
    codes = bytes([0, 1, 0, 0, 0, 1])  # a prompt; a share, of group 0; lists of group 0; a key frame
    head = struct.pack("<4sB6I", b"SLST", 2, 1, 1, 1, 5, 2, len(names))
    assert read_chunk(zlib.compress(head + names + numbers + codes)) == LedgerSegment(
        [LedgerStep(7, (LedgerEntry("a", 30, "prefill"),), (BlockEvent("share", "a", 0, [8, 9]),))],
        PoolState({"a": [[8, 9]]}, [8]),
    )


def test_a_ledger_of_the_third_version_is_read():
    """As written by hand after its description: as the second, and what a swap brought back; cached blocks as they came."""
    names = b'["a"]'
    numbers = struct.pack("<14I", 7, 1, 1, 0, 30, 1, 2, 31, 1, 0, 2, 2, 9, 8) + struct.pack("<4I", 9, 8, 8, 3)
    codes = bytes([0, EVENT_KINDS.index("swap_in"), 0, 0, 0, 1])
    head = struct.pack("<4sB6I", b"SLST", 3, 1, 1, 1, 6, 2, len(names))
    assert read_chunk(zlib.compress(head + names + numbers + codes)) == LedgerSegment(
        [LedgerStep(7, (LedgerEntry("a", 30, "prefill"),), (BlockEvent("swap_in", "a", 0, [9, 8], 31),))],
        PoolState({"a": [[9, 8]]}, [8, 3]),
    )


def test_the_fourth_version_is_as_described():
    """The tokens of a list one higher, block ids as differences: 9, 8 (one less); 8 and 9, cached, ascend."""
    ledger = StepLedger()
    frame = PoolState({"a": [[9, 8]], "b": [[5]]}, [9, 8], {"a": 31})
    ledger.append(7, ["a"], [30], ["prefill"], [BlockEvent("swap_in", "a", 0, [9, 8], 31)], frame)
    encode, _, _ = ledger.flush()  # type: ignore[misc]
    names = b'["a","b"]'
    numbers = struct.pack("<17I", 7, 1, 1, 0, 30, 1, 2, 31, 1, 2, 0, 2, 1, 2, 32, 0, 0)
    numbers += struct.pack("<7I", 9, 2**32 - 1, 1, 2**32 - 1, 2**32 - 3, 3, 1)
    codes = bytes([0, EVENT_KINDS.index("swap_in"), 0, 0, 0, 0, 1])
    head = struct.pack("<4sB6I", b"SLST", 4, 1, 1, 1, 7, 3, len(names))
    assert zlib.decompress(encode()) == head + names + numbers + codes


def test_a_chunk_every_256_steps():
    ledger = StepLedger()
    chunks = [append(ledger, step, [("r", 1, "decode")]) for step in range(2 * KEY_FRAME_STEPS + 1)]
    full = [(step, chunk) for step, chunk in enumerate(chunks) if chunk is not None]
    assert [step for step, _ in full] == [255, 511]
    assert [(chunk.first_step, chunk.last_step) for _, chunk in full] == [(0, 255), (256, 511)]
    rest = ledger.flush()
    assert rest is not None
    assert [step.step for step in read_chunk(rest.encode()).steps] == [512]
    assert len(read_chunk(full[0][1].encode()).steps) == KEY_FRAME_STEPS


class Load(NamedTuple):
    """Of 64 requests that are replaced when they end; lengths are drawn between two bounds."""

    num_blocks: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    first_step: int  # that counts: the pool is in the state that the case is about
    num_cached: int  # blocks at least, at the end


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(4000, (20, 600), (1, 120), 0, 3500), id="a small pool"),
        pytest.param(Load(55_581, (500, 4000), (20, 300), 1024, 55_000), id="a large pool full of cache"),
        pytest.param(Load(100_000, (23_000, 23_000), (1500, 1500), 0, 91_000), id="long prompts"),
    ],
)
def test_small_even_when_requests_come_and_go(load: Load):
    """1,000 steps of 64 requests, with all their blocks' events and key frames of the whole pool, stay below 0.5 MB."""
    manager = KVCacheManager(load.num_blocks, 16, [KVGroupSpec(1, 1, 1, 1)], prefix_key(model="m"))
    scheduler = Scheduler(manager, max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=40_000)
    manager.log_events(True)
    ledger, chunks, rng, count = StepLedger(), [], random.Random(0), 0
    for step in range(load.first_step + 1024):
        while len(scheduler.requests) < 64:
            count += 1
            prompt = rng.choices(range(50_000), k=rng.randint(*load.prompts))
            sampling = SamplingParams(max_tokens=rng.randint(*load.outputs), ignore_eos=True)
            scheduler.add_request(Request(f"run12-{count}", prompt, sampling, frozenset(), 0.0))
        scheduled = scheduler.schedule()
        frame = manager.state(scheduler.requests) if step % KEY_FRAME_STEPS == 0 else None
        tokens = scheduled.num_scheduled_tokens
        chunk = ledger.append(step, tokens, tokens.values(), scheduled.kinds.values(), manager.take_events(), frame)
        if chunk is not None and chunk.first_step >= load.first_step:
            chunks.append(chunk.encode())
        computed = zip(tokens.items(), scheduled.num_computed_tokens, strict=True)
        ready = [key for (key, size), start in computed if start + size == len(scheduler.requests[key].token_ids)]
        scheduler.update_from_output(scheduled, ModelRunnerOutput({key: [rng.randrange(50_000)] for key in ready}))
    assert manager.pool.num_cached_blocks >= load.num_cached
    assert [read_chunk(data).key_frame is None for data in chunks] == [False] * 4
    num_bytes = sum(map(len, chunks))
    assert num_bytes < 0.5e6 * 1.024


def test_damage_is_named():
    ledger = StepLedger()
    append(ledger, 0, [("r", 1, "decode")])
    chunk = ledger.flush()
    assert chunk is not None
    data = chunk.encode()
    raw = zlib.decompress(data)
    with pytest.raises(DatabaseError, match="damaged"):
        read_chunk(data[:-3])
    with pytest.raises(DatabaseError, match="damaged"):
        read_chunk(zlib.compress(raw[:-1]))
    with pytest.raises(DatabaseError, match="damaged"):
        read_chunk(zlib.compress(b"????" + raw[4:]))
    with pytest.raises(DatabaseError, match="format 9; this version of ServeLab reads formats 1 to 4"):
        read_chunk(zlib.compress(raw[:4] + b"\x09" + raw[5:]))
