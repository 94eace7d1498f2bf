"""`PoolHistory`: the KV pool at any step of a ledger, and how many tokens each request has in it.

Events say which blocks a request holds, not how full they are. A key frame tells the tokens of each request; behind it come
those that a request finds in the prefix cache (whole blocks) or with another sample of its prompt or in host memory (as the
event says) and those that are scheduled. So no step needs more than what has been written since the last key frame, however
long its requests have run.

Key frames of older ledgers do not tell. But a request's tables only grow (what falls behind a window leaves the null block in
its place), so its beginning is found by walking back until all entries are accounted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backend.metrics.block_map import GIVING, BlockMap, FilledBlockMap, tokens_given
from backend.metrics.ledger import KEY_FRAME_STEPS
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.ledger_reader import LedgerReader


class PoolMoment(NamedTuple):
    """The pool when a step was handed to the worker. Changes when its `PoolHistory` is asked for another step."""

    step: LedgerStep
    blocks: BlockMap
    num_tokens: dict[str, int]  # request -> tokens in its blocks, this step's included; without those nobody knows of


class PoolHistory:
    """Remembers the last step asked for, so that going on from there reads the steps between only.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, reader: LedgerReader, block_size: int) -> None:
        self._reader = reader
        self._block_size = block_size
        self._blocks: FilledBlockMap | None = None
        self._step: LedgerStep | None = None  # the last that they have followed

    @property
    def steps(self) -> range:
        return self._reader.steps

    @property
    def gaps(self) -> list[str]:
        """See `LedgerReader`."""
        return self._reader.gaps

    def extend(self, chunks: Sequence[tuple[bytes, int, int]]) -> None:
        """Go on with what has come behind the ledger of the run, see `LedgerReader`."""
        self._reader = self._reader.longer(chunks)

    def at(self, number: int) -> PoolMoment | None:
        """None in a ledger that was written before there were block events. Raises `DatabaseError` as `LedgerReader.step`."""
        blocks, step = self._blocks, self._step
        if blocks is None or step is None or not step.step <= number <= step.step + KEY_FRAME_STEPS:
            found = self._reader.since_key_frame(number)
            if found is None:
                return None
            frame, (step, *steps) = found
            unknown = {key: len(groups[0]) for key, groups in frame.held.items() if key not in frame.num_tokens}
            tokens = _tokens_held(self._reader, step.step, unknown, self._block_size)
            blocks = FilledBlockMap(frame, {**frame.num_tokens, **tokens}, self._block_size)
        else:
            steps = self._reader.read(step.step + 1, number)
        self._step = step
        self._blocks = None  # until all has been followed: a damaged step leaves them half way
        for step in steps:
            blocks.follow(step)
            self._step = step
        self._blocks = blocks
        return PoolMoment(self._step, blocks, blocks.num_tokens)


def _tokens_held(reader: LedgerReader, number: int, held: dict[str, int], block_size: int) -> dict[str, int]:
    """Tokens that requests have in their blocks at step `number`; the step's own are among them.

    A request that has begun before the ledger is left out: nobody knows what it found.

    Args:
        held: request -> number of its blocks in each group.
    """
    unaccounted = dict(held)
    tokens = dict.fromkeys(unaccounted, 0)
    for at in range(number, reader.steps.start - 1, -1):
        if not unaccounted:
            break
        step = reader.step(at)
        for entry in step.entries:
            if entry.request_id in unaccounted:
                tokens[entry.request_id] += entry.num_scheduled_tokens
        for event in reversed(step.events):
            request_id = event.request_id
            if request_id not in unaccounted or event.group or event.kind not in GIVING:
                continue  # groups have the same number of blocks, for the same tokens
            tokens[request_id] += tokens_given(event, block_size)
            unaccounted[request_id] -= len(event.block_ids)
            if not unaccounted[request_id]:
                del unaccounted[request_id]
    for request_id in unaccounted:
        del tokens[request_id]
    return tokens
