"""The step ledger: what goes in comes out, in few bytes, and damage is named."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.output import StepKind
from backend.errors import DatabaseError
from backend.metrics.ledger import STEPS_PER_CHUNK, LedgerChunk, LedgerEntry, LedgerStep, StepLedger, decode_chunk

Entry = tuple[str, int, StepKind]

_ENTRIES = st.lists(
    st.tuples(st.text(max_size=8), st.integers(0, 2**32 - 1), st.sampled_from(["prefill", "decode", "recompute"])),
    max_size=6,
)


def append(ledger: StepLedger, step: int, entries: list[Entry]) -> LedgerChunk | None:
    return ledger.append(step, *([entry[column] for entry in entries] for column in range(3)))  # type: ignore[misc]


@given(st.lists(_ENTRIES, min_size=1, max_size=20), st.integers(0, 1000))
def test_round_trip(steps: list[list[Entry]], first: int):
    ledger = StepLedger()
    for offset, entries in enumerate(steps):
        assert append(ledger, first + offset, entries) is None
    chunk = ledger.flush()
    assert chunk is not None
    assert (chunk.first_step, chunk.last_step) == (first, first + len(steps) - 1)
    assert decode_chunk(chunk.encode()) == [
        LedgerStep(first + i, tuple(LedgerEntry(*entry) for entry in entries)) for i, entries in enumerate(steps)
    ]
    assert ledger.flush() is None


def test_a_chunk_every_256_steps():
    ledger = StepLedger()
    chunks = [append(ledger, step, [("r", 1, "decode")]) for step in range(2 * STEPS_PER_CHUNK + 1)]
    full = [(step, chunk) for step, chunk in enumerate(chunks) if chunk is not None]
    assert [step for step, _ in full] == [255, 511]
    assert [(chunk.first_step, chunk.last_step) for _, chunk in full] == [(0, 255), (256, 511)]
    rest = ledger.flush()
    assert rest is not None
    assert [step.step for step in decode_chunk(rest.encode())] == [512]
    assert len(decode_chunk(full[0][1].encode())) == STEPS_PER_CHUNK


def test_small_even_when_requests_come_and_go():
    """1,000 steps of 64 requests, each replaced after 17 tokens, stay far below 0.5 MB."""
    ledger = StepLedger()
    chunks = []
    for step in range(1000):
        entries: list[Entry] = []
        for slot in range(64):
            life, age = divmod(step + slot, 17)
            entries.append((f"run12-{slot}-{life}", 37 + slot if age == 0 else 1, "prefill" if age == 0 else "decode"))
        chunks.append(append(ledger, step, entries))
    chunks.append(ledger.flush())
    assert sum(len(chunk.encode()) for chunk in chunks if chunk) < 0.5e6


def test_damage_is_named():
    ledger = StepLedger()
    append(ledger, 0, [("r", 1, "decode")])
    chunk = ledger.flush()
    assert chunk is not None
    data = chunk.encode()
    raw = zlib.decompress(data)
    with pytest.raises(DatabaseError, match="damaged"):
        decode_chunk(data[:-3])
    with pytest.raises(DatabaseError, match="damaged"):
        decode_chunk(zlib.compress(raw[:-1]))
    with pytest.raises(DatabaseError, match="damaged"):
        decode_chunk(zlib.compress(b"????" + raw[4:]))
    with pytest.raises(DatabaseError, match="format 9; this version of ServeLab reads format 1"):
        decode_chunk(zlib.compress(raw[:4] + b"\x09" + raw[5:]))
