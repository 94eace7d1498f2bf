"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from backend.errors import ServeLabError
from db.run_ids import parse_run_id

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one setting, e.g. cache.block_size=32 or workload.seed=1. Repeatable.",
    ),
]
ConfigSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one engine setting, e.g. cache.block_size=32. Repeatable."
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON document on stdout, everything else on stderr. "
        "On an error before a run exists, stdout stays empty.",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id, as in `servelab runs list`.")]
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run ids, as in `servelab runs list`.")]


def run_ids(names: Sequence[str]) -> list[int]:
    """Run ids as typed: 12 or #12. Raises `ServeLabError`."""
    ids = []
    for name in names:
        run_id = parse_run_id(name)
        if run_id is None:
            raise ServeLabError(f"{name!r} is not a run id; run ids are numbers, as in `servelab runs list`")
        ids.append(run_id)
    return ids
