"""Lookahead decoding: n-grams that the target itself finds a few tokens ahead, by Jacobi iteration, become drafts.

Fu, Bailis, Stoica and Zhang, "Break the sequential dependency of LLM inference using lookahead decoding" (ICML 2024,
arXiv:2402.02057). A window of W columns and N - 1 rows holds guesses: row r of column j is one for the place j + r behind the
next token. In every round the target runs the window beside the draft that it verifies, in one pass. A node sees the text, the
first row up to its own column, and the rows of its column up to its own; so each column with what the target gives behind its
last row is an n-gram of the target's own making, given the guesses of the columns before it. The pool keeps it, the oldest row
goes, and what the target gave is the new last row.

Unlike the paper, which verifies several n-grams of the pool in separate branches, a round verifies one chain: the newest
n-gram that begins with the last token, and further ones behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from backend.sample.random import Purpose, uniform
from backend.spec_decode.proposer import DraftOutput, DraftRequest


@dataclass(frozen=True)
class WindowLayout:
    """Where the nodes of a window stand. Nodes are numbered row by row.

    Attributes:
        num_columns: W, at least 1.
        ngram: N, at least 2.
    """

    num_columns: int
    ngram: int

    @property
    def num_rows(self) -> int:
        return self.ngram - 1

    @property
    def num_nodes(self) -> int:
        return self.num_rows * self.num_columns

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [num_nodes]: places behind the request's last token."""
        row, column = np.divmod(np.arange(self.num_nodes), self.num_columns)
        return row + column + 1

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool [num_nodes, num_nodes]: whether a node sees another one of the window, itself included."""
        row, column = np.divmod(np.arange(self.num_nodes), self.num_columns)
        first_row = (row == 0) & (column <= column[:, None])
        own_column = (column == column[:, None]) & (row <= row[:, None])
        return first_row | own_column

    def tree_bits(self, num_drafts: int) -> np.ndarray:
        """Who sees whom in a request's rows of a step: its last token, a chain of drafts, the window.

        Returns int64 [num_rows], which rows each one sees, bit j for the j-th, as `paged_attention` takes it.
        """
        begin = num_drafts + 1  # of the window
        sees = np.tri(begin + self.num_nodes, dtype=bool)
        sees[begin:, 1:begin] = False
        sees[begin:, begin:] = self.ancestors
        bits = sees @ (np.uint64(1) << np.arange(len(sees), dtype=np.uint64))
        return bits.view(np.int64)


class NgramPool:
    """The newest n-gram that begins with each token."""

    def __init__(self) -> None:
        self._rests: dict[int, tuple[int, ...]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        self._rests[ngram[0]] = tuple(ngram[1:])

    def continuation(self, token_id: int, num_tokens: int) -> list[int]:
        """What follows a token by the pool, n-gram behind n-gram, as far as there is one; at most `num_tokens`."""
        found: list[int] = []
        while len(found) < num_tokens and (rest := self._rests.get(found[-1] if found else token_id)):
            found += rest
        return found[:num_tokens]


class LookaheadWindow:
    """Args:
    token_ids: int64 [num_rows, num_columns], the first guesses, which nobody made.
    """

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids
        self._num_made = np.zeros(token_ids.shape[1], dtype=np.int64)  # of each column, rows that the target made

    def advance(self, outputs: Sequence[int]) -> list[list[int]]:
        """An iteration has ended: the rows move up, and the guesses stand one place further back.

        Args:
            outputs: what the target gives behind the last row, a token for each column.
        Returns:
            The n-grams of those columns in which it has made all tokens but the first.
        """
        rows = np.vstack((self.token_ids, np.asarray(outputs, dtype=np.int64)))
        is_whole = self._num_made >= len(self.token_ids) - 1
        self.token_ids = rows[1:]
        self._num_made += 1
        return rows.T[is_whole].tolist()

    def slide(self, token_ids: np.ndarray) -> None:
        """The text has come further: the first columns go, and as many come at the end.

        Args:
            token_ids: int64 [num_rows, num_new_columns], which nobody made; at most as many as there are columns.
        """
        count = token_ids.shape[1]
        self.token_ids = np.hstack((self.token_ids[:, count:], token_ids))
        self._num_made = np.concatenate((self._num_made[count:], np.zeros(count, dtype=np.int64)))

    @property
    def next_guess(self) -> list[int]:
        """For the places right behind the next token: the first column."""
        return self.token_ids[:, 0].tolist()


@dataclass(slots=True)
class _State:
    text: list[int]
    window: LookaheadWindow
    pool: NgramPool
    num_behind: int = 0  # tokens by which the text has come further than the window


class LookaheadProposer:
    """Each request has a window and a pool of its own. Columns begin as pieces of the text.

    The granted places of a request are those of its draft, and behind them the window's: see `windows` and `observe`.

    Args:
        device: of the target.
    """

    def __init__(self, layout: WindowLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._states: dict[str, _State] = {}
        self._observed: tuple[list[str], Tensor] | None = None
        self._outputs: dict[str, list[int]] = {}

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        window = LookaheadWindow(self._columns_of(token_ids, self._layout.num_columns))
        self._states[request_id] = _State(list(token_ids), window, NgramPool())

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        state = self._states[request_id]
        outputs = self._take_outputs(request_id)
        if outputs is not None:
            for ngram in state.window.advance(outputs):
                state.pool.add(ngram)
            state.num_behind -= 1
        state.text += token_ids
        state.num_behind += len(token_ids)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._take_outputs(request_id)

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """There is nothing to compute."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        drafts = []
        for request in requests:
            state, count = self._caught_up(request.request_id), request.max_tokens - self._layout.num_nodes
            found = state.pool.continuation(state.text[-1], count)
            drafts.append(found or state.window.next_guess[: max(0, count)])
        k = max(map(len, drafts))
        padded = torch.tensor([draft + [0] * (k - len(draft)) for draft in drafts], dtype=torch.int64)
        return DraftOutput(padded.view(len(drafts), k).to(self._device), [len(draft) for draft in drafts])

    def windows(self, request_ids: Sequence[str]) -> np.ndarray:
        """The nodes that are to run beside the drafts of these requests, int64 [num_reqs, num_nodes]."""
        return np.stack([self._caught_up(request_id).window.token_ids.reshape(-1) for request_id in request_ids])

    def observe(self, request_ids: Sequence[str], token_ids: Tensor) -> None:
        """A round has been started.

        Args:
            request_ids: whose windows ran.
            token_ids: int64 [num_reqs, num_columns], what the target gives behind the nodes of the last row; perhaps not
                computed yet.
        """
        self._outputs.clear()
        self._observed = list(request_ids), token_ids

    def _caught_up(self, request_id: str) -> _State:
        """A window is moved to the end of its text when it is to run: most steps of a batch may have no drafts."""
        state = self._states[request_id]
        if state.num_behind:
            state.window.slide(self._columns_of(state.text, min(state.num_behind, self._layout.num_columns)))
            state.num_behind = 0
        return state

    def _columns_of(self, text: Sequence[int], num_columns: int) -> np.ndarray:
        """Pieces of a text as the last columns of the window behind it, int64 [num_rows, num_columns].

        Drawn, but the same ones whenever they are asked for.
        """
        places = len(text) + self._layout.num_columns - num_columns + np.arange(num_columns)
        draws = uniform([0] * num_columns, places.tolist(), Purpose.DRAFT)
        begins = (draws * len(text)).astype(np.int64)
        return np.asarray(text, dtype=np.int64)[(begins + np.arange(self._layout.num_rows)[:, None]) % len(text)]

    def _take_outputs(self, request_id: str) -> list[int] | None:
        """What a request's window gave in the round whose result is known by now; None where it did not run."""
        if self._observed is not None:
            request_ids, token_ids = self._observed
            self._outputs, self._observed = dict(zip(request_ids, token_ids.tolist(), strict=True)), None
        return self._outputs.pop(request_id, None)
