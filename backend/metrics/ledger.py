"""The step ledger: what ran in each step, and what became of the KV blocks, in compressed chunks.

A step's record is written as `backend.metrics.ledger_format` says. Every `KEY_FRAME_STEPS` a chunk begins with the whole
pool as it is at its first step; the events of the steps behind tell the rest: whoever wants one step reads back to the last
key frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from backend.core.block_events import BlockEvent, PoolState
from backend.core.output import StepKind
from backend.metrics.ledger_format import Columns

LEDGER_KIND = "steps"  # the `kind` of these chunks in `StatsSink.on_chunk`
KEY_FRAME_STEPS = 256  # a chunk has so many steps at most


class LedgerChunk(NamedTuple):
    """In the order of `StatsSink.on_chunk`'s arguments after the kind."""

    encode: Callable[[], bytes]
    first_step: int
    last_step: int


class StepLedger:
    """Collects steps in the engine's thread. `append` only extends columns; who wants a chunk's bytes encodes them."""

    def __init__(self) -> None:
        self._columns = Columns()

    @property
    def num_steps(self) -> int:
        """Steps since the last chunk."""
        return len(self._columns.steps)

    def append(
        self,
        step: int,
        request_ids: Iterable[str],
        num_scheduled_tokens: Iterable[int],
        kinds: Iterable[StepKind],
        events: Sequence[BlockEvent] = (),
        key_frame: PoolState | None = None,
    ) -> LedgerChunk | None:
        """Add a step's entries, column by column, in batch order. Gives the chunk that is full now.

        Args:
            events: since the step before.
            key_frame: the pool after them; the step then begins a chunk, and the one before it is given.
        """
        before = self.flush() if key_frame is not None else None
        columns = self._columns
        if key_frame is not None:
            columns.key_frame = key_frame
        columns.add_entries(list(request_ids), list(num_scheduled_tokens), list(kinds))
        columns.steps.append(step)
        columns.events.extend(events)
        columns.event_counts.append(len(events))
        return self.flush() if len(columns.steps) >= KEY_FRAME_STEPS else before

    def flush(self) -> LedgerChunk | None:
        """The steps since the last chunk, which are forgotten here; None when there are none."""
        columns = self._columns
        if not columns.steps:
            return None
        self._columns = Columns()
        return LedgerChunk(columns.encode, columns.steps[0], columns.steps[-1])
