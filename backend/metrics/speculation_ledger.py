"""The speculation ledger: every draft of a run, how likely its tokens were, and what became of it, in compressed chunks.

A chunk is zlib data over, in little-endian order:

    magic "SLSP" (4 bytes), version u8
    num_steps u32, num_rounds u32, num_drafts u32, size of the id table u32
    id table: JSON list of request ids, UTF-8
    columns, one after the other:
        of a step: its number u32, rounds u32, draft ms f32, verify ms f32 [num_steps each]
        of a round: id table index u32, position u32, last token u32, drafted tokens u8, accepted u8, delivered u8, nodes of
        its tree u8, 0 of a chain [num_rounds each]
        of a drafted token, round by round: its id u32; probability by the target, that it is accepted, by the draft, f16 each
        [num_drafts each]

Version 1 has no nodes.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from backend.errors import DatabaseError
from backend.metrics.ledger import LedgerChunk
from backend.metrics.ledger_format import IdTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    import numpy as np

    from backend.core.output import DraftRounds

SPECULATION_KIND = "speculation"  # the `kind` of these chunks in `StatsSink.on_chunk`
MAX_STEPS = 256  # of a chunk

_MAGIC, _VERSION = b"SLSP", 2
_HEAD = struct.Struct("<4sBIIII")
_OF_A_STEP = ("<u4", "<u4", "<f4", "<f4")
_OF_A_ROUND = ("<u4", "<u4", "<u4", "u1", "u1", "u1", "u1")
_OF_A_DRAFT = ("<u4", "<f2", "<f2", "<f2")


@dataclass(frozen=True, slots=True)
class Round:
    """One draft of a request and its verification. Probabilities are of the drafted tokens, to three digits.

    Of a tree the drafted tokens are those of the accepted path and, where that was left before its end, the first one that was
    refused there: one of each depth that was reached.
    """

    step: int
    request_id: str
    position: int  # index in the output of the first drafted token
    draft_token_ids: tuple[int, ...]  # at least one
    draft_probs: tuple[float, ...]  # 1 where the proposer drafts without a draw
    target_probs: tuple[float, ...]
    accept_probs: tuple[float, ...]
    num_accepted: int  # leading ones of the draft
    token_id: int  # behind those: recovered, or the bonus token of a draft that was accepted whole
    num_emitted: int  # tokens that were delivered: one more than accepted, or fewer where the output ended among them
    draft_ms: float  # of all rounds of the step
    verify_ms: float
    num_nodes: int | None = None  # of the tree that was drafted, the text's last token left out; None: it was a chain


def round_to_dict(each: Round) -> dict[str, Any]:
    """Plain data for JSON, without the step."""
    values = asdict(each)
    del values["step"]
    return values


class _Columns:
    """A chunk's rounds. Numbers are kept unboxed, so that neither keeping nor encoding them takes Python objects."""

    def __init__(self) -> None:
        self.ids = IdTable()
        # Of a step: its number, rounds, width of its rows of drafts, and the two times.
        self.steps: list[tuple[int, int, int, float, float]] = []
        # Of a round.
        self.id_indices, self.positions = array("I"), array("I")
        self.token_ids = array("l")  # where logits were not usable, a token is no more than some number
        self.num_drafted, self.num_accepted = array("I"), array("I")
        self.num_emitted, self.num_nodes = array("I"), array("I")
        # Of a drafted token, step by step as they come: int64 [rounds, width] and float32 [3, rounds, width].
        self.draft_token_ids, self.probs = bytearray(), bytearray()

    def add(self, step: int, rounds: DraftRounds, positions: list[int], num_emitted: list[int]) -> None:
        """Args:
        positions, num_emitted: of each round.
        """
        ids, num_rounds = self.ids, len(positions)
        self.id_indices.fromlist([ids[request_id] for request_id in rounds.request_ids])
        self.positions.fromlist(positions)
        self.token_ids.fromlist(rounds.token_ids)
        self.num_drafted.fromlist(rounds.num_draft_tokens)
        self.num_accepted.fromlist(rounds.num_accepted)
        self.num_emitted.fromlist(num_emitted)
        self.num_nodes.fromlist(rounds.num_nodes or [0] * num_rounds)
        drafts = rounds.draft_token_ids
        self.draft_token_ids += drafts.tobytes()
        self.probs += rounds.probs.tobytes()
        self.steps.append((step, num_rounds, drafts.shape[1], rounds.draft_ms, rounds.verify_ms))

    def encode(self) -> bytes:
        import numpy as np

        steps, num_rounds, widths, *times = (np.array(column) for column in zip(*self.steps, strict=True))
        num_drafted = np.asarray(self.num_drafted)
        # A row may be longer than its draft, and those of one step longer than those of another.
        row_widths = np.repeat(widths, num_rounds)
        depths = np.arange(row_widths.sum()) - np.repeat(row_widths.cumsum() - row_widths, row_widths)
        drafted = np.flatnonzero(depths < np.repeat(num_drafted, row_widths))
        # Of a step, all probabilities of a kind are in front of those of the next kind.
        sizes = num_rounds * widths
        step_of = np.repeat(np.repeat(np.arange(len(steps)), num_rounds), num_drafted)
        firsts, strides = drafted + 2 * (sizes.cumsum() - sizes)[step_of], sizes[step_of]
        probs = np.frombuffer(self.probs, dtype=np.float32)
        of_a_step = (steps, num_rounds, *times)
        of_a_round = (self.id_indices, self.positions, self.token_ids, num_drafted)
        of_a_round += (self.num_accepted, self.num_emitted, self.num_nodes)
        of_a_draft = [np.frombuffer(self.draft_token_ids, dtype=np.int64)[drafted]]
        of_a_draft += [probs[firsts + kind * strides] for kind in range(3)]
        columns = zip((*of_a_step, *of_a_round, *of_a_draft), (*_OF_A_STEP, *_OF_A_ROUND, *_OF_A_DRAFT), strict=True)
        written = (np.asarray(column).astype(dtype).tobytes() for column, dtype in columns)
        names = json.dumps(list(self.ids), ensure_ascii=False, separators=(",", ":")).encode()
        head = _HEAD.pack(_MAGIC, _VERSION, len(steps), len(num_drafted), len(drafted), len(names))
        # Probabilities hardly get smaller, however long one tries.
        return zlib.compress(b"".join((head, names, *written)), level=1)


class SpeculationLedger:
    """Collects rounds in the engine's thread. `append` only extends columns; who wants a chunk's bytes encodes them."""

    def __init__(self) -> None:
        self._columns = _Columns()

    def append(
        self, step: int, rounds: DraftRounds, positions: Mapping[str, int], num_emitted: Mapping[str, int]
    ) -> LedgerChunk | None:
        """Add a step's rounds. Gives the chunk that is full now.

        Args:
            positions: request -> output tokens before the step; rounds of others, which had ended, are left out.
            num_emitted: request -> output tokens of the step; rounds of others, which failed, are left out.
        """
        ids = rounds.request_ids
        try:
            placed, emitted = [positions[key] for key in ids], [num_emitted[key] for key in ids]
        except KeyError:  # few steps have any that are left out
            rounds = _known(rounds, positions.keys() & num_emitted.keys())
            ids = rounds.request_ids
            placed, emitted = [positions[key] for key in ids], [num_emitted[key] for key in ids]
        columns = self._columns
        columns.add(step, rounds, placed, emitted)
        return self.flush() if len(columns.steps) >= MAX_STEPS else None

    def flush(self) -> LedgerChunk | None:
        """The rounds since the last chunk, which are forgotten here; None when there are none."""
        columns = self._columns
        if not columns.steps:
            return None
        self._columns = _Columns()
        return LedgerChunk(columns.encode, columns.steps[0][0], columns.steps[-1][0])


def _known(rounds: DraftRounds, request_ids: Set[str]) -> DraftRounds:
    """Those of these requests."""
    rows = [row for row, request_id in enumerate(rounds.request_ids) if request_id in request_ids]

    def of(column: list[Any]) -> list[Any]:
        return [column[row] for row in rows]

    return replace(
        rounds,
        request_ids=of(rounds.request_ids),
        num_draft_tokens=of(rounds.num_draft_tokens),
        num_accepted=of(rounds.num_accepted),
        token_ids=of(rounds.token_ids),
        draft_token_ids=rounds.draft_token_ids[rows],
        probs=rounds.probs[:, rows],
        num_nodes=rounds.num_nodes and of(rounds.num_nodes),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RoundTable:
    """The rounds of a chunk by column, in the order of their steps: int64 and, where they end in `_ms`, float32 [num_rounds].

    Attributes:
        num_nodes: of trees; 0: it was a chain.
        request: place in `request_ids`, which are in the order of their first rounds.
        ends: of the round's drafted tokens in `draft_token_ids` int64 and the probabilities float16, each [num_drafts].
    """

    request_ids: list[str]
    step: np.ndarray
    request: np.ndarray
    position: np.ndarray
    token_id: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    num_emitted: np.ndarray
    num_nodes: np.ndarray
    draft_ms: np.ndarray
    verify_ms: np.ndarray
    ends: np.ndarray
    draft_token_ids: np.ndarray
    target_probs: np.ndarray
    accept_probs: np.ndarray
    draft_probs: np.ndarray

    def round(self, row: int) -> Round:
        end = int(self.ends[row])
        drafts = slice(end - int(self.num_drafted[row]), end)
        return Round(
            step=int(self.step[row]),
            request_id=self.request_ids[self.request[row]],
            position=int(self.position[row]),
            draft_token_ids=tuple(self.draft_token_ids[drafts].tolist()),
            draft_probs=tuple(self.draft_probs[drafts].tolist()),
            target_probs=tuple(self.target_probs[drafts].tolist()),
            accept_probs=tuple(self.accept_probs[drafts].tolist()),
            num_accepted=int(self.num_accepted[row]),
            token_id=int(self.token_id[row]),
            num_emitted=int(self.num_emitted[row]),
            draft_ms=float(self.draft_ms[row]),
            verify_ms=float(self.verify_ms[row]),
            num_nodes=int(self.num_nodes[row]) or None,
        )


def read_rounds(data: bytes) -> list[Round]:
    """The rounds of a chunk one by one. Raises as `read_table`."""
    table = read_table(data)
    return [table.round(row) for row in range(len(table.step))]


def read_table(data: bytes) -> RoundTable:
    """One chunk. Raises `DatabaseError` when it is damaged or written by a newer version."""
    try:
        return _decoded(data)
    except (TypeError, zlib.error, struct.error) as error:
        raise DatabaseError(f"the speculation ledger is damaged: {error}") from None
    except (IndexError, ValueError, RecursionError):
        raise DatabaseError("the speculation ledger is damaged: its parts do not fit together") from None


def _decoded(data: bytes) -> RoundTable:
    raw = zlib.decompress(data)
    magic, version, num_steps, num_rounds, num_drafts, names_size = _HEAD.unpack_from(raw)
    if magic == _MAGIC and version not in (1, _VERSION):
        raise DatabaseError(
            f"the speculation ledger has format {version}; this version of ServeLab reads formats 1 to {_VERSION}"
        )
    of_a_round = _OF_A_ROUND if version > 1 else _OF_A_ROUND[:-1]
    parts = ((_OF_A_STEP, num_steps), (of_a_round, num_rounds), (_OF_A_DRAFT, num_drafts))
    widths = [(dtype, count) for dtypes, count in parts for dtype in dtypes]
    size = _HEAD.size + names_size + sum(int(dtype[-1]) * count for dtype, count in widths)
    if magic != _MAGIC or len(raw) != size:
        raise DatabaseError("the speculation ledger is damaged: its parts do not add up")
    ids = json.loads(raw[_HEAD.size : _HEAD.size + names_size])
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise ValueError("ids are strings")
    columns = _columns(raw, _HEAD.size + names_size, widths)
    if version == 1:
        columns.insert(-len(_OF_A_DRAFT), columns[-len(_OF_A_DRAFT) - 1] * 0)
    steps, counts, draft_ms, verify_ms, indices, positions, token_ids, drafted, accepted, emitted, nodes, *drafts = (
        columns
    )
    if int(counts.sum()) != num_rounds or int(drafted.sum()) != num_drafts:
        raise ValueError("counts do not add up")
    if num_rounds and int(indices.max()) >= len(ids):
        raise IndexError("a round is of no request")
    step, draft_ms, verify_ms = (column.repeat(counts) for column in (steps, draft_ms, verify_ms))
    by_round = step, indices, positions, token_ids, drafted, accepted, emitted, nodes, draft_ms, verify_ms
    return RoundTable(ids, *by_round, drafted.cumsum(), *drafts)


def _columns(raw: bytes, offset: int, widths: Sequence[tuple[str, int]]) -> list[np.ndarray]:
    import numpy as np

    columns = []
    for dtype, count in widths:
        column = np.frombuffer(raw, dtype=dtype, count=count, offset=offset)
        offset += column.nbytes
        columns.append(column.astype(np.int64) if column.dtype.kind == "u" else column)
    return columns
