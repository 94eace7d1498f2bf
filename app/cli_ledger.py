"""`servelab runs ledger`: a run's steps as JSON lines, blocks included. No engine, no torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from app import terminal
from app.cli_options import RunArgument, run_ids
from backend.errors import DatabaseError


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
    share, copy, free, preempt, swap_out, swap_in, evict, cache, uncache, slide, give_back.
    """
    from app.services import Services
    from backend.metrics.ledger import LEDGER_KIND
    from backend.metrics.ledger_reader import LedgerReader, step_to_dict

    with terminal.results() as out, Services.open() as services:
        (run,) = services.repository.get_all(run_ids([name]))
        reader = LedgerReader(services.repository.chunks(run.run_id, LEDGER_KIND))
        if not reader.steps:
            raise DatabaseError(f"run #{run.run_id} has no step ledger")
        for step in reader.read(first, reader.steps.stop - 1 if last is None else last):
            document = step_to_dict(step)
            block_map = reader.block_map(step.step) if blocks else None
            if block_map is not None:
                document |= {"held": block_map.held, "cached": sorted(block_map.cached)}
            out.write(json.dumps(document, ensure_ascii=False) + "\n")
