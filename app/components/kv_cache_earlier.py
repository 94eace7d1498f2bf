"""The runs that had filled the prefix cache when a run began warm: which they were, their prompts, and the blocks they left.

The engine keeps its cache as long as one process runs one config; a run of another empties it. So these are the runs of the
same process with an equal config before it, back to one that began cold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app import formatting
from app.components import kv_cache_prompts
from app.components.kv_cache_map import request_name, run_of
from app.services import Services
from backend.analysis import run_prompts
from backend.analysis.earlier_blocks import EarlierBlocks
from backend.analysis.prefix_cache import EarlierRuns
from backend.analysis.run_prompts import RequestTokens
from backend.errors import ServeLabError
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from db.run_rows import Run

MAX_RUNS = 20
_MAX_LOOKED_AT = 200  # ids before the run, those of other processes included


@dataclass
class Earlier:
    """Attributes:
    run_ids: of the runs whose prompts are known, in order.
    problems: why it is not all that the cache held, each a sentence.
    """

    run_ids: list[int] = field(default_factory=list)
    blocks: EarlierBlocks = field(default_factory=EarlierBlocks)
    tokens: dict[str, RequestTokens] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def runs(self) -> EarlierRuns:
        return EarlierRuns(self.blocks.lives, self.tokens)


def load(services: Services, run: Run) -> Earlier | None:
    """None for a run that began with an empty cache. Raises `DatabaseError` for what cannot be read."""
    if (run.cache_state or {}).get("state") != "warm":
        return None
    runs, problem = _before(services, run)
    earlier = Earlier(problems=[problem] if problem else [])
    requests: dict[int, list[str]] = {}
    for each in runs:
        reader = LedgerReader(services.repository.chunks(each.run_id, LEDGER_KIND))
        try:
            requests[each.run_id] = earlier.blocks.take(reader)
        except (ServeLabError, ValueError) as error:
            earlier.problems.append(f"What run #{each.run_id} and those before it left is not known: {error}.")
            earlier.blocks = EarlierBlocks()
            requests.clear()
    known = _prompts(services, [each for each in runs if each.run_id in requests], requests, earlier.problems)
    for run_id in sorted(known):
        earlier.tokens |= known[run_id]
    earlier.run_ids = sorted(known)
    return earlier


def name_in(run_id: int, request_id: str) -> str:
    """What stands behind "request" on the page of a run: of a request of another one, with that."""
    other = run_of(request_id)
    name = request_name(request_id)
    return name if other is None or other == run_id else f"{name} of run #{other}"


def run_names(run_ids: Sequence[int]) -> str:
    """ "run #7", "runs #5 to #7" where none is between them, or one by one."""
    names = [f"#{run_id}" for run_id in run_ids]
    if len(names) == 1:
        return f"run {names[0]}"
    if len(names) > 2 and run_ids[-1] - run_ids[0] == len(names) - 1:
        return f"runs {names[0]} to {names[-1]}"
    return f"runs {', '.join(names[:-1])} and {names[-1]}"


def _before(services: Services, run: Run) -> tuple[list[Run], str | None]:
    """The runs in order, and why they are not all."""
    found: list[Run] = []
    for run_id in range(run.run_id - 1, max(0, run.run_id - 1 - _MAX_LOOKED_AT), -1):
        before = services.repository.get(run_id)
        if before is None:
            return found[::-1], (
                f"Run #{run_id} has been deleted: what it, and runs before it, may have left in the cache is not known."
            )
        if before.owner != run.owner or before.started_at is None:
            continue
        if before.kind != "serve" or before.config != run.config:
            return found[
                ::-1
            ], f"Run #{run_id} is not of the same config, so the runs that filled the cache are not known."
        if len(found) == MAX_RUNS:
            return found[::-1], f"Runs before #{found[-1].run_id} are left out: at most {MAX_RUNS} are looked at."
        found.append(before)
        if (before.cache_state or {}).get("state") == "cold":
            return found[::-1], None
    return found[::-1], "No run that began with an empty cache is stored before it, so not all that it held is known."


def _prompts(
    services: Services, runs: Sequence[Run], requests: Mapping[int, Sequence[str]], problems: list[str]
) -> dict[int, dict[str, RequestTokens]]:
    """By run and request, the newest runs first as far as there is room."""
    made: dict[int, dict[str, RequestTokens]] = {}
    room = run_prompts.MAX_PROMPT_TOKENS
    for run in reversed(runs):
        try:
            prompts = kv_cache_prompts.open_prompts(run)
            prompts.grow(services)
            found = {request_id: prompts.known.tokens_of(request_id) for request_id in requests[run.run_id]}
        except ServeLabError as error:
            problems.append(f"The prompts of run #{run.run_id} cannot be had again: {error}.")
            continue
        known = {request_id: tokens for request_id, tokens in found.items() if tokens is not None}
        room -= sum(len(tokens.token_ids) for tokens in known.values())
        if room < 0:
            problems.append(
                f"The prompts of run #{run.run_id} and before are left out: there is room for "
                f"{formatting.count(run_prompts.MAX_PROMPT_TOKENS)} tokens in all."
            )
            break
        made[run.run_id] = known
    return made
