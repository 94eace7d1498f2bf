"""Runs of a real engine whose waste is worth looking at, and the truth about each of their steps."""

from __future__ import annotations

from app.services import Services
from backend.metrics.kv_use import KVPool
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from db.run_rows import Run
from tests.app.engine_runs import run_to_the_end
from tests.metrics.waste_truth import naive_waste

_SMALL = ("model.device=cpu", "cache.block_size=4", "scheduler.max_num_seqs=8", "workload.sampling.ignore_eos=true")
_SYNTHETIC = ("workload.source.kind=synthetic", "workload.source.num_requests=12")
_LENGTHS = (
    'workload.source.prompt_len={kind="uniform",min=4,max=30}',
    'workload.output_len={kind="uniform",min=2,max=24}',
)
_ARRIVING = (*_SMALL, *_SYNTHETIC, *_LENGTHS, "model.name=dummy:tiny", "cache.num_blocks=90", "model.max_model_len=80")
SETTINGS = {
    "paged": _ARRIVING,
    "contiguous": (*_ARRIVING, "cache.layout=contiguous"),
    "prefix caching": (
        *(*_SMALL, "model.name=dummy:tiny", "cache.num_blocks=40", "workload.source.kind=shared_prefix"),
        *("workload.source.groups=2", "workload.source.prompts_per_group=5", "workload.source.prefix_len=18"),
        *("workload.source.suffix_len=5", "workload.output_len=14"),
    ),
    "swap": (
        *(*_SMALL, *_SYNTHETIC, *_LENGTHS, "model.name=dummy:tiny", "cache.num_blocks=20"),
        *("scheduler.preemption=swap", "cache.enable_prefix_caching=false"),
    ),
    "window": (
        *_SMALL,
        *_SYNTHETIC,
        "workload.source.prompt_len=50",
        "model.name=dummy:tiny-windows",
        "cache.num_blocks=300",
    ),
    "closed loop": (
        *(*_SMALL, *_SYNTHETIC, "model.name=dummy:tiny", "workload.output_len=3", "cache.num_blocks=300"),
        *("workload.arrivals.kind=closed_loop", "workload.arrivals.concurrency=2"),
    ),
}


def make_runs(services: Services) -> dict[str, int]:
    """Name in `SETTINGS` -> run."""
    return {name: run_to_the_end(services, lines) for name, lines in SETTINGS.items()}


def truth(services: Services, run: Run) -> list[dict[str, int]]:
    """Each step's figures from its own snapshot, counted slot by slot."""
    assert run.resolved_config
    assert run.load
    block_size = run.resolved_config["cache"]["block_size"]
    pool = KVPool.of_run(run.resolved_config, run.load["model"], run.load["num_blocks"])
    rows = services.repository.steps(run.run_id)
    reader, found = LedgerReader(services.repository.chunks(run.run_id, LEDGER_KIND)), []
    assert [row["step"] for row in rows] == list(reader.steps)
    for row in rows:
        moment = PoolHistory(reader, block_size).at(row["step"])
        assert moment is not None
        scheduled = {entry.request_id: entry.num_scheduled_tokens for entry in moment.step.entries}
        figures = naive_waste(
            moment.blocks.held, moment.num_tokens, scheduled, row["num_free_blocks"], pool, block_size
        )
        assert figures["num_slots"] == row["num_referenced_blocks"] * block_size, "as the pool itself counted"
        found.append({"step": row["step"]} | figures)
    return found


def wasted(figures: dict[str, int]) -> int:
    return sum(figures[f"num_{kind}_slots"] for kind in ("unused", "reserved", "passed"))


def first_measured(services: Services, run: Run) -> int:
    arrival = min(row["arrival_time"] for row in services.repository.requests(run.run_id) if not row["warmup"])
    return next(step for step, start, _ in services.repository.step_times(run.run_id) if start >= arrival)
