"""What recording a run costs: the same workload with the database recorder, without a ledger, and without both.

    python -m benchmarks.recording [--model NAME] [--speculation [ngram|eagle]] [--requests N] [--repeats N] [-o FILE]

The three take turns. The live view is on in all, and where nothing is recorded the engine still keeps its ledgers, as it does
for whoever listens. `--model dummy:tiny --requests 64 --output-len 128` is the hard case: its steps take 2 ms and are nearly
all Python, which recording shares the interpreter with.

The ledger that is left out is that of steps; with `--speculation` it is that of speculation alone, and every step drafts that
can, whether it pays or not (`speculative.adaptive` is off). What the device hands over of its rounds is the same in all.

A run must last for seconds, as its begin and its end are some milliseconds early or late by chance. On a CPU 16 requests of 32
tokens do; a card that speculates answers these in 35 ms, of which a quarter is such chance, where a ledger is to cost 2 % at
most. There it is 128 requests of 512 tokens by default, 16 at a time: another begins when one ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from app.services import new_host
from backend.analysis.draft_rounds import RoundHistory
from backend.compat import configure_cpu_environment
from backend.config import EngineConfig
from backend.core.kv_cache_manager import KVCacheManager
from backend.experiments.run_queue import RunQueue
from backend.metrics.environment import environment
from backend.metrics.ledger import LEDGER_KIND, StepLedger
from backend.metrics.speculation_ledger import SPECULATION_KIND, SpeculationLedger
from backend.workload.spec import Workload
from benchmarks.recording_table import NOT_RECORDED, RECORDED, WITHOUT_LEDGER, WITHOUT_SPECULATION, text_table
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.session import Database

# By default; `concurrency`: None: all at once.
SIZES: Mapping[str, int | None] = {"requests": 16, "output_len": 32, "concurrency": None, "repeats": 5}
CARD_SIZES: Mapping[str, int | None] = {"requests": 128, "output_len": 512, "concurrency": 16, "repeats": 9}


@contextmanager
def without_ledger() -> Iterator[None]:
    """The engine has no option for it: block events are dropped where they arise, steps where they are written down."""
    with (
        patch.object(KVCacheManager, "log_events", lambda self, on: None),
        patch.object(KVCacheManager, "state", lambda self, requests=None: None),
        patch.object(StepLedger, "append", lambda self, *columns: None),
    ):
        yield


@contextmanager
def without_speculation_ledger() -> Iterator[None]:
    """Rounds are dropped where they are written down: nothing is left to be encoded and stored."""
    with patch.object(SpeculationLedger, "append", lambda self, *columns: None):
        yield


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for, as plain data. Exits where a run does not finish or has another ledger than it should."""
    overrides: dict[str, Any] = {"model.name": options.model, "cache.enable_prefix_caching": False}
    kind, left_out, without = LEDGER_KIND, WITHOUT_LEDGER, without_ledger
    if options.speculation:
        kind, left_out, without = SPECULATION_KIND, WITHOUT_SPECULATION, without_speculation_ledger
        overrides |= {"speculative.method": options.speculation, "speculative.adaptive": False}
    if options.head:
        overrides["speculative.model"] = options.head
    config = EngineConfig().with_overrides(overrides)
    workload = Workload.from_dict(
        {
            "source": {"kind": "synthetic", "num_requests": options.requests, "prompt_len": 32},
            "arrivals": _arrivals(options.concurrency),
            "sampling": {"ignore_eos": True},
            "output_len": options.output_len,
            "warmup_requests": 0,
        }
    )
    variants = (RECORDED, left_out, NOT_RECORDED)
    durations: dict[str, list[float]] = {name: [] for name in variants}
    queue = RunQueue(new_host())
    num_steps = num_rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/servelab.db")
        repository = RunRepository(database)
        for repeat in range(options.repeats + 1):  # the first is warm-up
            # Another one goes first each time, so that a drift of the machine falls on all.
            for name in variants[repeat % 3 :] + variants[: repeat % 3]:
                run_id = repository.create(config.to_dict(), workload.to_dict())
                recorder = None if name == NOT_RECORDED else RunRecorder(database, run_id)
                with without() if name == left_out else nullcontext():
                    queue.submit(run_id, config, workload, (recorder,) if recorder else ())
                    end = queue.wait(run_id)
                if end is None or end.summary is None:
                    raise SystemExit(f"the run did not finish: {end}")
                if recorder:
                    recorder.close()
                    num_steps = len(repository.steps(run_id))
                chunks = repository.chunks(run_id, kind)
                if bool(chunks) != (name == RECORDED):
                    raise SystemExit(f"a run {name} has {'a' if chunks else 'no'} ledger: {kind}")
                if chunks and options.speculation:
                    history = RoundHistory()
                    history.extend(chunks)
                    num_rounds = len(history.columns.num_drafted)
                if repeat:
                    durations[name].append(end.summary.duration_s)
                time.sleep(0.2)
        database.close()
    queue.close()
    medians = {name: statistics.median(values) for name, values in durations.items()}
    return {
        "benchmark": "recording",
        "date": datetime.now(UTC).date().isoformat(),
        "model": options.model,
        "speculation": options.speculation,
        "requests": options.requests,
        "concurrency": options.concurrency,
        "output_len": options.output_len,
        "steps": num_steps,
        "rounds": num_rounds if options.speculation else None,
        "repeats": options.repeats,
        "duration_s": {
            name: {"median": medians[name], "min": min(values), "max": max(values)}
            for name, values in durations.items()
        },
        "step_ms": medians[NOT_RECORDED] / num_steps * 1e3,
        "overhead": medians[RECORDED] / medians[NOT_RECORDED] - 1,
        "ledger_overhead": medians[RECORDED] / medians[left_out] - 1,
        "environment": environment(),
    }


def _arrivals(concurrency: int | None) -> dict[str, Any]:
    if concurrency is None:
        return {"kind": "all_at_once"}
    return {"kind": "closed_loop", "concurrency": concurrency}


def _speculates_on_card(options: argparse.Namespace) -> bool:
    if not options.speculation:
        return False
    configure_cpu_environment()  # OpenMP reads its environment once, when torch is imported
    from backend.worker.device import choose_device

    return choose_device(EngineConfig()) == "cuda"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recording",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--speculation",
        nargs="?",
        const="ngram",
        choices=("ngram", "eagle"),
        help="who drafts; n-grams if none is named",
    )
    parser.add_argument("--head", metavar="DIR", help="of eagle; default: the one that comes for the model")
    for name, what in (
        ("requests", "of a run"),
        ("output_len", "tokens of each"),
        ("concurrency", "requests at a time"),
        ("repeats", "runs of each kind"),
    ):
        elsewhere, on_card = (sizes[name] or "all" for sizes in (SIZES, CARD_SIZES))
        defaults = f"{elsewhere}; with speculation on a card: {on_card}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{what}; default: {defaults}")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.head and options.speculation != "eagle":
        parser.error("--head belongs to --speculation eagle")
    for name, default in (CARD_SIZES if _speculates_on_card(options) else SIZES).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    result = run(options)
    print(text_table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
