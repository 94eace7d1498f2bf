"""What recording a run costs: the same workload with the database recorder, without the step ledger, and without both.

    python benchmarks/recording.py [--model smollm2-135m] [--requests 16] [--output-len 32] [--repeats 5] [-o FILE]

The three take turns. The live view is on in all, and where nothing is recorded the engine still keeps its ledger, as it does
for whoever listens. `--model dummy:tiny --requests 64 --output-len 128` is the hard case: its steps take 2 ms and are nearly
all Python, which recording shares the interpreter with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from app.services import new_host
from backend.config import EngineConfig
from backend.core.kv_cache_manager import KVCacheManager
from backend.experiments.run_queue import RunQueue
from backend.metrics.environment import environment
from backend.metrics.ledger import LEDGER_KIND, StepLedger
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.session import Database

VARIANTS = ("recorded", "without the ledger", "not recorded")


@contextmanager
def without_ledger() -> Iterator[None]:
    """The engine has no option for it: block events are dropped where they arise, steps where they are written down."""
    with (
        patch.object(KVCacheManager, "log_events", lambda self, on: None),
        patch.object(KVCacheManager, "state", lambda self, requests=None: None),
        patch.object(StepLedger, "append", lambda self, *columns: None),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()

    config = EngineConfig().with_overrides({"model.name": arguments.model, "cache.enable_prefix_caching": False})
    workload = Workload.from_dict(
        {
            "source": {"kind": "synthetic", "num_requests": arguments.requests, "prompt_len": 32},
            "sampling": {"ignore_eos": True},
            "output_len": arguments.output_len,
            "warmup_requests": 0,
        }
    )
    durations: dict[str, list[float]] = {name: [] for name in VARIANTS}
    queue = RunQueue(new_host())
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/servelab.db")
        repository = RunRepository(database)
        num_steps = 0
        for repeat in range(arguments.repeats + 1):  # the first is warm-up
            # Another one goes first each time, so that a drift of the machine falls on all.
            for name in VARIANTS[repeat % 3 :] + VARIANTS[: repeat % 3]:
                run_id = repository.create(config.to_dict(), workload.to_dict())
                recorder = None if name == "not recorded" else RunRecorder(database, run_id)
                with without_ledger() if name == "without the ledger" else nullcontext():
                    queue.submit(run_id, config, workload, (recorder,) if recorder else ())
                    end = queue.wait(run_id)
                if end is None or end.summary is None:
                    raise SystemExit(f"the run did not finish: {end}")
                if recorder:
                    recorder.close()
                    num_steps = len(repository.steps(run_id))
                has_ledger = bool(repository.chunks(run_id, LEDGER_KIND))
                if has_ledger != (name == "recorded"):
                    raise SystemExit(f"a run {name} has {'a' if has_ledger else 'no'} ledger")
                if repeat:
                    durations[name].append(end.summary.duration_s)
                time.sleep(0.2)
        database.close()
    queue.close()
    medians = {name: statistics.median(values) for name, values in durations.items()}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": arguments.model,
        "steps": num_steps,
        "repeats": arguments.repeats,
        "duration_s": {
            name: {"median": medians[name], "min": min(values), "max": max(values)}
            for name, values in durations.items()
        },
        "step_ms": medians["not recorded"] / num_steps * 1e3,
        "overhead": medians["recorded"] / medians["not recorded"] - 1,
        "ledger_overhead": medians["recorded"] / medians["without the ledger"] - 1,
        "environment": environment(),
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
