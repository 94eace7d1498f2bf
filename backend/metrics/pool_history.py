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

from backend.core.block_events import BlockEvent
from backend.metrics.block_map import BlockMap
from backend.metrics.ledger import KEY_FRAME_STEPS
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.ledger_reader import LedgerReader

_GIVING = ("allocate", "share", "swap_in")  # kinds of events that add to the blocks of a request


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
        self._last: PoolMoment | None = None

    @property
    def steps(self) -> range:
        return self._reader.steps

    def extend(self, chunks: Sequence[tuple[bytes, int, int]]) -> None:
        """Go on with what has come behind the ledger of the run, see `LedgerReader`."""
        self._reader = self._reader.longer(chunks)

    def at(self, number: int) -> PoolMoment | None:
        """None in a ledger that was written before there were block events. Raises `DatabaseError` as `LedgerReader.step`."""
        last = self._last
        if last is not None and last.step.step <= number <= last.step.step + KEY_FRAME_STEPS:
            for step in self._reader.read(last.step.step + 1, number):
                _advance(last.blocks, last.num_tokens, step, self._block_size)
            self._last = last._replace(step=self._reader.step(number))
        else:
            found = self._reader.since_key_frame(number)
            if found is None:
                return None
            frame, steps = found
            blocks, tokens = BlockMap(frame), dict(frame.num_tokens)
            unknown = {key: len(groups[0]) for key, groups in frame.held.items() if key not in tokens}
            tokens |= _tokens_held(self._reader, steps[0].step, unknown, self._block_size)
            for step in steps[1:]:
                _advance(blocks, tokens, step, self._block_size)
            self._last = PoolMoment(steps[-1], blocks, tokens)
        return self._last


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
            if request_id not in unaccounted or event.group or event.kind not in _GIVING:
                continue  # groups have the same number of blocks, for the same tokens
            tokens[request_id] += _tokens_found(event, block_size)
            unaccounted[request_id] -= len(event.block_ids)
            if not unaccounted[request_id]:
                del unaccounted[request_id]
    for request_id in unaccounted:
        del tokens[request_id]
    return tokens


def _advance(blocks: BlockMap, tokens: dict[str, int], step: LedgerStep, block_size: int) -> None:
    for event in step.events:
        request_id = event.request_id
        if event.kind in _GIVING:
            assert request_id is not None
            if request_id not in blocks.held:
                tokens[request_id] = 0
            if not event.group and request_id in tokens:
                tokens[request_id] += _tokens_found(event, block_size)
        elif event.kind in ("free", "preempt", "swap_out") and request_id is not None:
            tokens.pop(request_id, None)
        blocks.apply([event])
    for entry in step.entries:
        if entry.request_id in tokens:
            tokens[entry.request_id] += entry.num_scheduled_tokens


def _tokens_found(event: BlockEvent, block_size: int) -> int:
    """Tokens that a request has in the blocks that it gets."""
    if event.kind == "share":
        return event.num_tokens or len(event.block_ids) * block_size
    return event.num_tokens
