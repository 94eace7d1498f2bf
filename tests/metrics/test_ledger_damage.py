"""Ledgers that are damaged: one clear error each, whatever is wrong, and what is whole can still be read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from backend.core.block_events import BlockEvent, PoolState
from backend.errors import DatabaseError
from backend.metrics.block_map import BlockMap
from backend.metrics.kv_use import KVPool
from backend.metrics.ledger_format import read_chunk
from backend.metrics.ledger_reader import Chunk, LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.metrics.prefix_history import PrefixHistory
from backend.metrics.step_words import step_sentences
from backend.metrics.waste_history import WasteHistory
from tests.app.kv_runs import BLOCK_SIZE, NUM_BLOCKS, NUM_STEPS, traffic

HEADER = struct.Struct("<4sB6I")


@pytest.fixture(scope="module")
def chunks() -> list[Chunk]:
    """Steps 0 to 15 with a key frame, 16 to 31, 32 to 36, 37 to 39."""
    return [(chunk.encode(), chunk.first_step, chunk.last_step) for chunk in traffic(1).chunks]


def payload(chunk: Chunk) -> bytes:
    return zlib.decompress(chunk[0])


def test_each_wrong_byte_is_an_error_or_another_ledger(chunks: list[Chunk]) -> None:
    raw = payload(chunks[0])
    refused, lost = [], []
    for place in range(len(raw)):
        damaged = zlib.compress(raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :])
        try:
            segment = read_chunk(damaged)
        except DatabaseError as error:
            refused.append(str(error))
            continue
        for step in segment.steps:
            assert step_sentences(step)
        reader = LedgerReader([(damaged, 0, 15), *chunks[1:]])
        try:
            reader.block_map(NUM_STEPS - 1)
        except DatabaseError as error:
            lost.append(str(error))
    assert len(refused) > len(raw) / 4
    assert all(message.startswith("the step ledger ") and "\n" not in message for message in refused)
    assert all("damaged" in message for message in lost)


@pytest.mark.parametrize("data", ["text", None, 7, b"", b"{}", zlib.compress(b""), zlib.compress(b"SLST")])
def test_what_is_no_chunk_is_named(data: Any) -> None:
    with pytest.raises(DatabaseError, match="the step ledger is damaged"):
        read_chunk(data)


@pytest.mark.parametrize("names", [b"{", b"{}", b"[1]", b'"ab"', b"null", b"\xff\xff", b"[" * 100_000])
def test_ids_that_are_no_list_of_texts(chunks: list[Chunk], names: bytes) -> None:
    raw = payload(chunks[1])
    head = HEADER.unpack_from(raw)
    behind = raw[HEADER.size + head[-1] :]
    with pytest.raises(DatabaseError, match="damaged"):
        read_chunk(zlib.compress(HEADER.pack(*head[:-1], len(names)) + names + behind))


def test_a_request_that_is_none_holds_no_blocks() -> None:
    """As written by hand: a step whose allocation names no request."""
    names = b'["a"]'
    numbers = struct.pack("<14I", 0, 1, 1, 0, 30, 0, 1, 0, 0, 1, 1, 0, 5, 5)
    codes = bytes([0, 0, 0, 0, 1])
    with pytest.raises(DatabaseError, match="damaged"):
        read_chunk(zlib.compress(HEADER.pack(b"SLST", 4, 1, 1, 1, 2, 1, len(names)) + names + numbers + codes))


@pytest.mark.parametrize(
    ("damage", "words", "whole"),
    [
        (lambda them: [them[0], *them[2:]], "steps 16 to 31 are missing", [0, 15]),
        (lambda them: them[1:], "steps 0 to 15 are missing", []),
        (lambda them: [*them[:2], them[1], *them[2:]], "steps 16 to 31 are there twice", [0, 15]),
        (
            lambda them: [them[0], (them[1][0], 9, 31), *them[2:]],
            "steps 9 to 15 are there twice|stored as steps 9 to 31 holds other",
            [0, 8],
        ),
        (
            lambda them: [them[0], (them[1][0], 18, 31), *them[2:]],
            "steps 16 to 17 are missing|stored as steps 18 to 31 holds other",
            [0, 15],
        ),
        (lambda them: [*them[:3], (them[3][0], 37, 900)], "stored as steps 37 to 900 holds other ones", [0, 15, 36]),
        (lambda them: [*them[:3], (them[3][0], 37, 38)], "stored as steps 37 to 38 holds other ones", [0, 15, 36]),
        (lambda them: [*them[:3], (them[2][0], 37, 41)], "stored as steps 37 to 41 holds other ones", [0, 15, 36]),
    ],
)
def test_a_chunk_too_few_or_too_many_is_named(
    chunks: list[Chunk], damage: Callable[[Sequence[Chunk]], list[Chunk]], words: str, whole: list[int]
) -> None:
    stored, reader = damage(chunks), LedgerReader(chunks)
    broken = LedgerReader(stored)
    assert broken.gaps == [part for part in words.split("|") if part.startswith("steps")]
    last = broken.steps[-1]
    histories: list[Callable[[], Any]] = [
        lambda: broken.block_map(last),
        lambda: PoolHistory(broken, BLOCK_SIZE).at(last),
        lambda: PrefixHistory(BLOCK_SIZE).extend(broken),
        lambda: WasteHistory(BLOCK_SIZE, KVPool(NUM_BLOCKS)).extend(stored),
    ]
    for replay in histories:
        with pytest.raises(DatabaseError, match=f"the step ledger is damaged: .*({words})"):
            replay()
    history = PoolHistory(broken, BLOCK_SIZE)
    for number in whole:
        assert broken.step(number) == reader.step(number)
        moment, expected = history.at(number), reader.block_map(number)
        assert moment is not None
        assert expected is not None
        assert (moment.blocks.held, moment.blocks.cached) == (expected.held, expected.cached)


def test_a_whole_ledger_has_no_gap(chunks: list[Chunk]) -> None:
    assert LedgerReader(chunks).gaps == LedgerReader([]).gaps == []


@pytest.mark.parametrize(
    "event",
    [
        BlockEvent("free", "b", 0, []),
        BlockEvent("copy", "b", 0, [1, 2]),
        BlockEvent("copy", "a", 0, [7, 8]),
        BlockEvent("copy", "a", 0, [1]),
        BlockEvent("copy", "a", 1, [1, 2]),
        BlockEvent("slide", "a", 0, []),
        BlockEvent("slide", "a", 0, [9]),
    ],
)
def test_events_about_what_nobody_holds(event: BlockEvent) -> None:
    blocks = BlockMap(PoolState({"a": [[1, 3]]}, []))
    with pytest.raises(DatabaseError, match=f"damaged: '{event.kind}' of request {event.request_id} is about blocks"):
        blocks.apply([event])


def test_a_history_is_right_again_after_a_step_that_could_not_be_followed(chunks: list[Chunk]) -> None:
    """Of the second chunk the replay breaks half way; the steps before are as they were."""
    cut = [chunks[0], (chunks[2][0], 32, 36)]
    history, truth = PoolHistory(LedgerReader(cut), BLOCK_SIZE), LedgerReader(chunks).block_map(10)
    assert history.at(15) is not None
    for number in (33, 36):
        with pytest.raises(DatabaseError, match="steps 16 to 31 are missing"):
            history.at(number)
    moment = history.at(10)
    assert moment is not None
    assert truth is not None
    assert moment.blocks.held == truth.held


def test_waste_of_a_damaged_ledger_stays_unknown(chunks: list[Chunk]) -> None:
    waste = WasteHistory(BLOCK_SIZE, KVPool(NUM_BLOCKS))
    waste.extend(chunks[:1])
    for late in (chunks[2:], chunks[1:]):
        with pytest.raises(DatabaseError, match="steps 16 to 31 are missing"):
            waste.extend(late)
