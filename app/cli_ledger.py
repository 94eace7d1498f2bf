"""`servelab runs ledger`: a run's steps as JSON lines, blocks included. No engine, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app import terminal
from app.cli_options import RunArgument, run_ids
from backend.errors import DatabaseError

if TYPE_CHECKING:
    from backend.metrics.ledger_reader import Chunk

_Rounds = list[dict[str, Any]]
_NOTHING: tuple[float, _Rounds] = (math.inf, [])


def ledger(
    name: RunArgument,
    first: Annotated[int, typer.Option("--first", min=0, help="First step.")] = 0,
    last: Annotated[int | None, typer.Option("--last", min=0, help="Last step; otherwise the run's.")] = None,
    blocks: Annotated[
        bool,
        typer.Option("--blocks", help="Add the pool as it is in each step: blocks held by request, cached blocks."),
    ] = False,
) -> None:
    """Write what ran in each step of a run, one JSON object a line.

    `requests` says what ran: request, tokens, kind. `events` says what became of KV blocks since the step before: allocate,
    share, copy, free, preempt, swap_out, swap_in, evict, cache, uncache, slide, give_back. Where drafts were verified, `rounds`
    has a request's drafted tokens, their probabilities by draft and target and that of being accepted, how many were, the token
    that the target set behind them, how many tokens were delivered, and the step's time for drafts and for their verification. Of
    a draft tree these are the tokens of the accepted path and the first one refused at its end; `num_nodes` is how many it had.
    """
    from app.services import Services
    from backend.metrics.ledger import LEDGER_KIND
    from backend.metrics.ledger_reader import LedgerReader, step_to_dict
    from backend.metrics.speculation_ledger import SPECULATION_KIND

    with terminal.results() as out, Services.open() as services:
        (run,) = services.repository.get_all(run_ids([name]))
        reader = LedgerReader(services.repository.chunks(run.run_id, LEDGER_KIND))
        if not reader.steps:
            raise DatabaseError(f"run #{run.run_id} has no step ledger")
        rounds = _by_step(services.repository.chunks(run.run_id, SPECULATION_KIND, first))
        at, of_step = next(rounds, _NOTHING)
        for step in reader.read(first, reader.steps.stop - 1 if last is None else last):
            document = step_to_dict(step)
            while at < step.step:
                at, of_step = next(rounds, _NOTHING)
            if at == step.step:
                document["rounds"] = of_step
            block_map = reader.block_map(step.step) if blocks else None
            if block_map is not None:
                document |= {"held": block_map.held, "cached": sorted(block_map.cached)}
            out.write(json.dumps(document, ensure_ascii=False) + "\n")


def _by_step(chunks: Iterable[Chunk]) -> Iterator[tuple[float, _Rounds]]:
    """The rounds of each step that has any, a chunk in memory at a time."""
    from backend.metrics.speculation_ledger import read_rounds, round_to_dict

    rounds = (each for data, _, _ in chunks for each in read_rounds(data))
    for step, of_step in groupby(rounds, lambda each: each.step):
        yield step, [round_to_dict(each) for each in of_step]
