"""What the rounds of a stored run add up to: how often each drafted position was accepted, and how long rounds were.

Counted is what was delivered. A token behind the end of an output was accepted in vain, and says nothing of its position either:
whether the rounds behind it would have come to it is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backend.metrics.ledger_reader import Chunk
from backend.metrics.speculation_ledger import Round, RoundTable, read_table

_MAX_DECODED = 4  # chunks whose tables are kept


class RoundColumns(NamedTuple):
    """Rounds in the order of their steps, a row each; int64 and, where they end in `_ms`, float64 [num_rounds]."""

    step: NDArray[Any]
    request: NDArray[Any]  # place in `RoundHistory.request_ids`
    num_drafted: NDArray[Any]
    num_accepted: NDArray[Any]  # that were verified
    num_emitted: NDArray[Any]
    draft_ms: NDArray[Any]  # of all rounds of the step
    verify_ms: NDArray[Any]

    @property
    def num_delivered(self) -> NDArray[Any]:
        """Drafted tokens that were accepted and are part of the output."""
        return np.minimum(self.num_accepted, self.num_emitted)

    def where(self, mask: NDArray[Any]) -> RoundColumns:
        return RoundColumns(*(column[mask] for column in self))


@dataclass(frozen=True, slots=True)
class PositionRate:
    """Attributes:
    position: in the draft, from 1 on.
    num_tested: rounds that drafted it and in which all before it were accepted.
    """

    position: int
    num_tested: int
    num_accepted: int

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_tested


class RoundHistory:
    """Grows chunk by chunk with a run that goes on."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []  # in the order of their first rounds
        self.next_step = 0  # behind the last chunk
        self._places: dict[str, int] = {}
        self._parts: list[RoundColumns] = []
        self._chunks: list[bytes] = []
        self._decoded: dict[int, RoundTable] = {}

    def extend(self, chunks: Iterable[Chunk]) -> None:
        """Take in chunks of the run's ledger, in order. Raises `DatabaseError` for a damaged one; those before it stay."""
        for data, _, last_step in chunks:
            table = read_table(data)
            places = np.zeros(len(table.request_ids), dtype=np.int64)
            for index in np.unique(table.request).tolist():
                request_id = table.request_ids[index]
                places[index] = self._places.setdefault(request_id, len(self.request_ids))
                if places[index] == len(self.request_ids):
                    self.request_ids.append(request_id)
            self._parts.append(
                RoundColumns(
                    table.step,
                    places[table.request],
                    table.num_drafted,
                    table.num_accepted,
                    table.num_emitted,
                    table.draft_ms.astype(np.float64),
                    table.verify_ms.astype(np.float64),
                )
            )
            self._chunks.append(data)
            self.next_step = last_step + 1
            for name in ("columns", "_totals"):
                self.__dict__.pop(name, None)

    @cached_property
    def columns(self) -> RoundColumns:
        """Of all rounds so far."""
        if not self._parts:
            return RoundColumns(*(np.zeros(0, np.int64),) * 5, *(np.zeros(0),) * 2)
        return RoundColumns(*(np.concatenate(columns) for columns in zip(*self._parts, strict=True)))

    def of(self, request_ids: Collection[str]) -> RoundColumns:
        places = [self._places[request_id] for request_id in request_ids if request_id in self._places]
        return self.columns.where(np.isin(self.columns.request, places))

    def totals(self) -> dict[str, int]:
        """How many rounds each request has."""
        return dict(zip(self.request_ids, self._totals[0].tolist(), strict=True))

    def totals_of(self, request_id: str) -> tuple[int, float]:
        """How many rounds a request with any has, and their mean acceptance length."""
        num_rounds, num_delivered = (int(column[self._places[request_id]]) for column in self._totals)
        return num_rounds, 1 + num_delivered / num_rounds

    @cached_property
    def _totals(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Rounds and delivered drafts by request."""
        columns = self.columns
        return np.bincount(columns.request), np.bincount(columns.request, columns.num_delivered)

    def rounds(self, request_id: str, first: int, end: int) -> list[Round]:
        """Those of one request with these numbers, `end` excluded; the first is number 0."""
        place = self._places.get(request_id)
        rows = np.flatnonzero(self.columns.request == place)[first:end]
        ends = np.cumsum([len(part.step) for part in self._parts])
        found = []
        for row in rows.tolist():
            chunk = int(np.searchsorted(ends, row, side="right"))
            found.append(self._table_of(chunk).round(row - int(ends[chunk]) + len(self._parts[chunk].step)))
        return found

    def _table_of(self, chunk: int) -> RoundTable:
        if chunk not in self._decoded:
            while len(self._decoded) >= _MAX_DECODED:
                del self._decoded[next(iter(self._decoded))]
            self._decoded[chunk] = read_table(self._chunks[chunk])
        return self._decoded[chunk]


def acceptance_rate(rounds: RoundColumns) -> float | None:
    """Accepted of drafted tokens; None without a round."""
    num_drafted = int(rounds.num_drafted.sum())
    return int(rounds.num_delivered.sum()) / num_drafted if num_drafted else None


def acceptance_length(rounds: RoundColumns) -> float | None:
    """1 + accepted tokens of a round, on average; None without a round."""
    return 1 + float(rounds.num_delivered.mean()) if len(rounds.step) else None


def rates_by_position(rounds: RoundColumns) -> list[PositionRate]:
    """Of each drafted position that was tested."""
    delivered = rounds.num_delivered
    was_rejected = (rounds.num_accepted < rounds.num_drafted) & (rounds.num_emitted >= rounds.num_accepted)
    found = []
    for position in range(1, int(rounds.num_drafted.max(initial=0)) + 1):
        num_accepted = int((delivered >= position).sum())
        num_rejected = int((was_rejected & (rounds.num_accepted == position - 1)).sum())
        if num_accepted + num_rejected:
            found.append(PositionRate(position, num_accepted + num_rejected, num_accepted))
    return found


def rolling_length(rounds: RoundColumns, window: int, max_points: int) -> list[tuple[int, float]]:
    """(step, mean acceptance length of the last `window` rounds up to its end), for at most so many steps, the last included.

    Begins with the first full window, or is one point where there is none.
    """
    num_rounds = len(rounds.step)
    if not num_rounds:
        return []
    window = min(window, num_rounds)
    sums = np.concatenate(([0], np.cumsum(rounds.num_delivered)))
    ends = np.unique(np.linspace(window, num_rounds, max_points).round().astype(np.int64))
    lengths = 1 + (sums[ends] - sums[ends - window]) / window
    return list(zip(rounds.step[ends - 1].tolist(), lengths.tolist(), strict=True))
