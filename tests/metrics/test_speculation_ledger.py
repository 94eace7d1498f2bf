"""The speculation ledger: what goes in comes out, and what is damaged is told in words."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest

from backend.core.output import DraftRounds
from backend.errors import DatabaseError
from backend.metrics.speculation_ledger import MAX_STEPS, Round, SpeculationLedger, read_rounds


def random_rounds(rng: random.Random, ids: list[str], k: int, *, trees: bool = False) -> DraftRounds:
    counts = [rng.randint(1, k) for _ in ids]
    counts[0] = k
    draws = np.random.default_rng(rng.randrange(2**32))
    return DraftRounds(
        request_ids=ids,
        num_draft_tokens=counts,
        num_accepted=[rng.randint(0, count) for count in counts],
        token_ids=[rng.randrange(2**17) for _ in ids],
        draft_token_ids=draws.integers(0, 2**17, (len(ids), k)),
        probs=draws.random((3, len(ids), k), dtype=np.float32),
        draft_ms=rng.random(),
        verify_ms=3 * rng.random(),
        num_nodes=[rng.randint(1, 63) for _ in ids] if trees else None,
    )


def expected_of(step: int, rounds: DraftRounds, positions: dict[str, int], emitted: dict[str, int]) -> list[Round]:
    found = []
    for row, request_id in enumerate(rounds.request_ids):
        if request_id not in positions or request_id not in emitted:
            continue
        count = rounds.num_draft_tokens[row]
        target, accept, draft = (tuple(part[row, :count].astype(np.float16).tolist()) for part in rounds.probs)
        found.append(
            Round(
                step=step,
                request_id=request_id,
                position=positions[request_id],
                draft_token_ids=tuple(rounds.draft_token_ids[row, :count].tolist()),
                draft_probs=draft,
                target_probs=target,
                accept_probs=accept,
                num_accepted=rounds.num_accepted[row],
                token_id=rounds.token_ids[row],
                num_emitted=emitted[request_id],
                draft_ms=float(np.float32(rounds.draft_ms)),
                verify_ms=float(np.float32(rounds.verify_ms)),
                num_nodes=rounds.num_nodes[row] if rounds.num_nodes else None,
            )
        )
    return found


def test_rounds_come_back_as_they_were() -> None:
    """Requests that had ended before the step, or failed in it, are left out; a chunk ends after so many steps."""
    rng, ledger, expected, chunks = random.Random(1), SpeculationLedger(), [], []
    for index in range(MAX_STEPS + 30):
        step = 2 * index  # steps without a draft leave gaps
        ids = [f"é-{number}" for number in rng.sample(range(20), rng.randint(1, 6))]
        rounds = random_rounds(rng, ids, k=rng.randint(1, 7), trees=rng.random() < 0.3)
        positions = {key: rng.randrange(1000) for key in ids if rng.random() < 0.9}
        emitted = {key: rng.randint(0, 8) for key in ids if rng.random() < 0.9}
        expected += expected_of(step, rounds, positions, emitted)
        chunks += [chunk] if (chunk := ledger.append(step, rounds, positions, emitted)) else []
    chunks.append(ledger.flush())
    assert [(chunk.first_step, chunk.last_step) for chunk in chunks] == [(0, 510), (512, 570)]
    assert [it for chunk in chunks for it in read_rounds(chunk.encode())] == expected
    assert ledger.flush() is None


def test_arrays_are_the_callers_own_again_once_they_are_added() -> None:
    """They need not lie row by row either: those of some rows, as numpy picks them, lie by request first."""
    rng, ledger = random.Random(3), SpeculationLedger()
    places = {"a": 1, "b": 2, "c": 3}
    rounds = random_rounds(rng, list(places), 4)
    rounds.probs = rounds.probs[:, [0, 1, 2]]
    assert not rounds.probs.flags.c_contiguous
    expected = expected_of(5, rounds, places, places)
    ledger.append(5, rounds, places, places)
    rounds.draft_token_ids[:] = 0
    rounds.probs[:] = 0
    chunk = ledger.flush()
    assert chunk is not None
    assert read_rounds(chunk.encode()) == expected


def test_a_token_that_means_nothing_leaves_the_other_rounds_as_they_are() -> None:
    """Behind logits that are not usable it may be below 0."""
    ledger, places = SpeculationLedger(), {"a": 1, "b": 2}
    rounds = random_rounds(random.Random(4), list(places), 4)
    rounds.token_ids[0] = -1
    ledger.append(5, rounds, places, places)
    chunk = ledger.flush()
    assert chunk is not None
    assert read_rounds(chunk.encode())[1:] == expected_of(5, rounds, places, places)[1:]


def chunk_bytes() -> bytes:
    rng, ledger = random.Random(2), SpeculationLedger()
    ledger.append(3, random_rounds(rng, ["a", "b"], 4), {"a": 1, "b": 2}, {"a": 1, "b": 1})
    chunk = ledger.flush()
    assert chunk is not None
    return chunk.encode()


def test_a_step_whose_rounds_are_all_left_out_is_no_round() -> None:
    ledger = SpeculationLedger()
    ledger.append(3, random_rounds(random.Random(2), ["a"], 4), {}, {})
    chunk = ledger.flush()
    assert chunk is not None
    assert read_rounds(chunk.encode()) == []


def test_a_later_format_is_named() -> None:
    raw = bytearray(zlib.decompress(chunk_bytes()))
    raw[4] = 9
    with pytest.raises(DatabaseError, match="has format 9; this version of ServeLab reads formats 1 to 2"):
        read_rounds(zlib.compress(bytes(raw)))


def test_the_format_before_trees_is_read() -> None:
    """It has a column less, the last one of the rounds."""
    raw = zlib.decompress(chunk_bytes())
    num_rounds, num_drafts = struct.unpack_from("<II", raw, 9)
    end = len(raw) - 10 * num_drafts
    assert raw[end - num_rounds : end] == bytes(num_rounds)
    old = raw[:4] + b"\x01" + raw[5 : end - num_rounds] + raw[end:]
    assert read_rounds(zlib.compress(old)) == read_rounds(chunk_bytes())
    assert num_rounds == 2


def test_damage_anywhere_is_told_or_harmless() -> None:
    """A byte changed or a piece cut off never ends in anything but a `DatabaseError`, or in rounds."""
    raw = zlib.decompress(chunk_bytes())
    head = struct.calcsize("<4sBIIII")
    for size in range(len(raw)):
        with pytest.raises(DatabaseError, match="damaged"):
            read_rounds(zlib.compress(raw[:size]))
    told = 0
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 0x55
        try:
            read_rounds(zlib.compress(bytes(damaged)))
        except DatabaseError:
            told += 1
    assert told >= head
    for junk in (b"", b"SLSP", chunk_bytes()[:-3]):
        with pytest.raises(DatabaseError, match="damaged"):
            read_rounds(junk)
