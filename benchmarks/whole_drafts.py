"""The rounds of a run that draft as many tokens as any: what verifying costs there is the cost of one number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backend.analysis.draft_rounds import RoundColumns
from backend.metrics.ledger_reader import Chunk
from backend.metrics.speculation_ledger import read_table


@dataclass(frozen=True, slots=True)
class WholeDrafts:
    """Attributes:
    rounds: of steps in which every round is one.
    num_tokens: that run in such a round: the text's last one and all that was drafted, which of a tree are all of its nodes.
    """

    rounds: RoundColumns
    num_tokens: int
    is_tree: bool


def whole_drafts(rounds: RoundColumns, chunks: Iterable[Chunk]) -> WholeDrafts:
    """Args:
        rounds: one at least.
        chunks: of the speculation ledger that they were read from. A row of `rounds` has the drafted tokens along one path of a
            tree; how many were verified stands only here.

    Raises `DatabaseError` for a damaged chunk.
    """
    tables = [read_table(data) for data, _, _ in chunks]
    num_nodes = np.concatenate([table.num_nodes for table in tables])  # 0 of a chain
    num_verified = np.maximum(num_nodes, rounds.num_drafted)
    most = int(num_verified.max())
    others = np.unique(rounds.step[num_verified < most])
    return WholeDrafts(rounds.where(~np.isin(rounds.step, others)), most + 1, bool(num_nodes.any()))
