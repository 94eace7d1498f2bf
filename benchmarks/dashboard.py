"""What an open dashboard costs the engine: decode throughput with browsers on the Run page over that with none.

Steps and pages share one interpreter, that of `servelab app`. A process serves the dashboard and starts runs in its own queue
(`benchmarks/dashboard_server.py`), in turns with nobody connected and with viewers that behave as browsers do
(`benchmarks/dashboard_viewer.py`): they have the Run page open before, ask for it again when the run starts, as the Start
button does, and then rerun its live fragments as often as those ask for it.

A pass is a run of whole waves of requests, as many as last about `PASS_S`: a closed loop, so that all requests of a wave
decode together and passes of both kinds are made of the same steps. Throughput comes from the run's step records: tokens over
time of the steps in which all requests decode, from the end of the step before. The first `LEAD_S` are left out, in which the
page is drawn as a whole. `run_share` in the details leaves nothing out: it is the ratio of the runs' output throughputs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from backend.config import EngineConfig
from backend.errors import EngineError
from backend.workload.spec import Workload
from benchmarks.dashboard_server import DashboardServer
from benchmarks.dashboard_viewer import Seen, Viewer
from benchmarks.figures import Figure, attempt
from db.repository import RunRepository
from db.session import Database

PASS_S = 2.5  # two looks at a run, at one a second; the larger models' waves are as long
LEAD_S = 0.5
WARM_UP_SHARE = 8  # a warm-up run makes one token in so many


def decode_intervals(steps: Sequence[Mapping[str, Any]], num_requests: int) -> list[float]:
    """Seconds of each step that decoded `num_requests` requests and nothing else, from the end of the step before.

    Args:
        steps: a run's records by column name, in order.
    """
    return [
        step["end_time"] - before["end_time"]
        for before, step in pairwise(steps)
        if step["num_prefill_tokens"] == 0 and step["num_output_tokens"] == num_requests
    ]


def dashboard_figures(model: str, config: EngineConfig, options: argparse.Namespace) -> Iterator[Figure]:
    """A figure for each of `options.dashboard_batches`. One that fails says why, and the rest goes on."""
    with tempfile.TemporaryDirectory() as folder, closing(DashboardServer(Path(folder))) as server:
        benchmark = DashboardBenchmark(model, config, options, server)
        for num_requests in options.dashboard_batches:
            name = f"dashboard {num_requests}"
            yield attempt(model, name, "share", lambda n=num_requests, name=name: benchmark.measure(name, n))


@dataclass(frozen=True, slots=True)
class _Pass:
    decode_tok_s: float
    run_tok_s: float
    seen: list[Seen]  # by each viewer


class DashboardBenchmark:
    """The figures of one model on one server, which loads it on first use."""

    def __init__(self, model: str, config: EngineConfig, options: argparse.Namespace, server: DashboardServer) -> None:
        self._model = model
        self._config = config
        self._options = options
        self._server = server
        self._watched = False  # the first pages that a server draws import and build what later ones reuse

    def measure(self, name: str, num_requests: int) -> Figure:
        """Raises `EngineError` when a run fails, the server is gone, or a viewer saw no live figures."""
        self._server.start()
        output_len = self._options.output_len
        workload = self._workload(num_requests, 1, max(4, output_len // WARM_UP_SHARE))
        step_s = statistics.median(self._intervals(self._run(workload, ()), num_requests))
        num_waves = max(1, round(PASS_S / (step_s * output_len)))
        workload, num_skipped = self._workload(num_requests, num_waves, output_len), int(LEAD_S / step_s)
        if not self._watched:
            self._pass(workload, num_requests, num_skipped, self._options.dashboard_clients)
            self._watched = True
        headless, polling = [], []
        for _ in range(max(1, self._options.repeats - 1)):
            headless.append(self._pass(workload, num_requests, num_skipped, 0))
            polling.append(self._pass(workload, num_requests, num_skipped, self._options.dashboard_clients))
        return self._figure(name, headless, polling)

    def _figure(self, name: str, headless: Sequence[_Pass], polling: Sequence[_Pass]) -> Figure:
        """Samples are those with viewers over the median without, so that their median is the ratio of medians."""
        headless_tok_s, polling_tok_s = ([each.decode_tok_s for each in passes] for passes in (headless, polling))
        middle = statistics.median(headless_tok_s)
        run_tok_s = [statistics.median(each.run_tok_s for each in passes) for passes in (headless, polling)]
        seen = [seen for each in polling for seen in each.seen]
        return Figure.of(
            self._model,
            name,
            "share",
            [rate / middle for rate in polling_tok_s],
            details={
                "clients": self._options.dashboard_clients,
                "reruns": sum(each.reruns for each in seen),
                "looks": sum(len(each.look_s) for each in seen),
                "draw_ms": statistics.median(each.draw_s[1] for each in seen) * 1e3,
                "look_ms": statistics.median(seconds for each in seen for seconds in each.look_s) * 1e3,
                "bytes": sum(each.received_bytes for each in seen),
                "headless_tok_s": headless_tok_s,
                "polling_tok_s": polling_tok_s,
                "run_share": run_tok_s[1] / run_tok_s[0],
            },
        )

    def _pass(self, workload: Workload, num_requests: int, num_skipped: int, num_viewers: int) -> _Pass:
        with ExitStack() as stack:
            viewers = [stack.enter_context(closing(Viewer(self._server.url))) for _ in range(num_viewers)]
            for viewer in viewers:
                viewer.wait_until_drawn()
            run_id = self._run(workload, viewers)
            seen = [viewer.seen() for viewer in viewers]
        if any(not each.look_s or len(each.draw_s) < 2 for each in seen):
            reruns = ", ".join(str(each.reruns) for each in seen)
            raise EngineError(f"no live figures came to a viewer while the run went on; reruns of fragments: {reruns}")
        intervals = self._intervals(run_id, num_requests)[num_skipped:]
        if not intervals:
            raise EngineError(f"the run is over before the first {LEAD_S} s, which are left out")
        with closing(Database.open(self._server.database_url)) as database:
            run = RunRepository(database).get(run_id)
        assert run is not None
        assert run.summary is not None
        return _Pass(num_requests * len(intervals) / sum(intervals), run.summary["output_throughput_tok_s"], seen)

    def _run(self, workload: Workload, viewers: Sequence[Viewer]) -> int:
        """The id of a run that has finished, with the page drawn anew for each viewer at its start."""
        run_id = self._server.start_run(self._config, workload)
        for viewer in viewers:
            viewer.draw()
        self._server.wait_for_run()
        return run_id

    def _intervals(self, run_id: int, num_requests: int) -> list[float]:
        with closing(Database.open(self._server.database_url)) as database:
            intervals = decode_intervals(RunRepository(database).steps(run_id), num_requests)
        if not intervals:
            raise EngineError(f"no step decoded all {num_requests} requests; scheduler.max_num_seqs may be less")
        return intervals

    def _workload(self, num_requests: int, num_waves: int, output_len: int) -> Workload:
        return Workload().with_overrides(
            {
                "source.kind": "synthetic",
                "source.num_requests": num_requests * num_waves,
                "source.prompt_len": self._options.input_len,
                "arrivals.kind": "closed_loop",
                "arrivals.concurrency": num_requests,
                "output_len": output_len,
                "sampling.ignore_eos": True,
                "warmup_requests": 0,
            }
        )
