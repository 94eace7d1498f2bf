"""The dashboard's figure on the CPU: viewers that really follow a run, its arithmetic, and servers that are gone."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.components import live_panel
from app.components import sidebar as sidebar_panel
from backend.config import EngineConfig
from backend.errors import EngineError
from backend.workload.spec import Workload
from benchmarks import dashboard, dashboard_server, engine
from benchmarks.dashboard import DashboardBenchmark, dashboard_figures, decode_intervals
from benchmarks.dashboard_server import DashboardServer
from benchmarks.dashboard_viewer import Viewer
from benchmarks.figures import Figure
from db.repository import RunRepository
from db.session import Database
from tests.ports import unused_port
from tests.waiting import until

CONFIG = EngineConfig.from_dict({"model": {"name": "dummy:tiny", "device": "cpu"}, "cache": {"cpu_bytes": 2**22}})
OPTIONS = argparse.Namespace(repeats=1, input_len=8, output_len=64, dashboard_batches=[2], dashboard_clients=1)


def workload(**changes: Any) -> Workload:
    return Workload().with_overrides(
        {
            "source.kind": "synthetic",
            "source.num_requests": 1,
            "source.prompt_len": 8,
            "arrivals.kind": "closed_loop",
            "output_len": 16,
            "sampling.ignore_eos": True,
            "warmup_requests": 0,
        }
        | changes
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    with closing(DashboardServer(tmp_path_factory.mktemp("dashboard"))) as server:
        server.start()
        yield server


@pytest.fixture(scope="module", autouse=True)
def ports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard_server, "_free_port", unused_port)
        yield


def measured(server: DashboardServer, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """A figure from passes that are long enough for a look at them, on a machine that may be busy."""
    for pass_s in (3.5, 10.0, 30.0, 90.0):
        monkeypatch.setattr(dashboard, "PASS_S", pass_s)
        try:
            return DashboardBenchmark("dummy:tiny", CONFIG, OPTIONS, server).measure("dashboard 2", 2)
        except EngineError as error:
            if "no live figures came" not in str(error) and "the run is over before" not in str(error):
                raise
    raise AssertionError("no look in a minute and a half")


def test_a_share_is_that_of_recorded_runs_with_a_viewer_and_without(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = measured(server, monkeypatch)
    details = figure.details
    headless, polling = details["headless_tok_s"], details["polling_tok_s"]
    assert (figure.name, figure.unit, figure.error) == ("dashboard 2", "share", None)
    assert len(headless) == len(polling) == 1
    assert figure.median == statistics.median(polling) / statistics.median(headless)
    assert 1 <= details["looks"] <= details["reruns"]
    assert details["bytes"] > 10_000 * details["looks"], "each has three charts"
    with closing(Database.open(server.database_url)) as database:
        repository = RunRepository(database)
        warm_up, first_watched, *passes = reversed(repository.list()[:4])  # of those before, no look came
        assert all(run.status == "finished" for run in (warm_up, first_watched, *passes))
        skipped = int(dashboard.LEAD_S / statistics.median(decode_intervals(repository.steps(warm_up.run_id), 2)))
        throughputs = []
        for run, rate in zip(passes, (*headless, *polling), strict=True):
            intervals = decode_intervals(repository.steps(run.run_id), 2)[skipped:]
            assert rate == 2 * len(intervals) / sum(intervals)
            assert run.summary is not None
            throughputs.append(run.summary["output_throughput_tok_s"])
        assert details["run_share"] == throughputs[1] / throughputs[0]


def test_a_viewer_follows_a_run_and_rests_without_one(server: DashboardServer) -> None:
    # A busy machine may take seconds to draw the page, and the first look comes a second later.
    assert any(viewer_looks(server, seconds) for seconds in (5, 20, 60))


def viewer_looks(server: DashboardServer, seconds: int) -> bool:
    """Whether a viewer looks at a run of so many seconds; that it does no more than that, and nothing after the run."""
    rate = 4
    paced = workload(**{"source.num_requests": seconds * rate, "arrivals.kind": "constant", "arrivals.rate": rate})
    with closing(Viewer(server.url)) as viewer:
        viewer.wait_until_drawn()
        widgets = dict(viewer._widgets)
        assert len(widgets) > 30, "the form's"
        begin = time.perf_counter()
        server.start_run(CONFIG, paced)
        viewer.draw()
        viewer.wait_until_drawn()
        assert viewer._widgets == widgets, "the page takes the states that came with the rerun for those it had drawn"
        server.wait_for_run()
        during, elapsed_s = viewer.seen(), time.perf_counter() - begin
        assert len(during.look_s) <= elapsed_s / live_panel.POLL_S
        sidebar = during.reruns - len(during.look_s)
        assert sidebar <= elapsed_s / sidebar_panel.POLL_S + 1
        if not during.look_s:
            return False
        until(lambda: len(viewer.seen().draw_s) == 3)  # the next look finds no run and draws the page anew
        until(lambda: rests(viewer))
        assert len(viewer.seen().draw_s) == 3
    return True


def rests(viewer: Viewer) -> bool:
    before = viewer.seen()
    time.sleep(1.2 * sidebar_panel.POLL_S)
    return viewer.seen() == before


def test_a_run_that_is_over_before_a_look_gives_no_figure(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "PASS_S", 0.01)
    options = argparse.Namespace(**vars(OPTIONS) | {"output_len": 4})
    with pytest.raises(EngineError, match="no live figures came to a viewer"):
        DashboardBenchmark("dummy:tiny", CONFIG, options, server).measure("dashboard 2", 2)


def test_a_run_that_is_refused_or_fails_is_named_and_the_server_goes_on(server: DashboardServer) -> None:
    with pytest.raises(EngineError, match="nowhere"):
        server.start_run(CONFIG.with_overrides({"model.name": "nowhere"}), workload())
    server.start_run(CONFIG, workload(**{"source.prompt_len": 2**14}))
    with pytest.raises(EngineError, match="16,384"):
        server.wait_for_run()
    one_at_a_time = CONFIG.with_overrides({"scheduler.max_num_seqs": 1})
    with pytest.raises(EngineError, match=r"scheduler\.max_num_seqs may be less"):
        DashboardBenchmark("dummy:tiny", one_at_a_time, OPTIONS, server).measure("dashboard 2", 2)


def test_a_server_that_dies_on_the_way_is_an_error_to_all_who_wait(tmp_path: Path) -> None:
    with closing(DashboardServer(tmp_path)) as server:
        server.start()
        with closing(Viewer(server.url)) as viewer:
            viewer.wait_until_drawn()
            server.start_run(CONFIG, workload(**{"source.num_requests": 5000}))
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=f"the dashboard's process ended with {-signal.SIGKILL}"):
                server.wait_for_run()
            viewer.draw()
            with pytest.raises(EngineError, match="has left its viewer"):
                viewer.wait_until_drawn()
        with pytest.raises(EngineError, match="takes no viewer"):
            Viewer(server.url)
        with pytest.raises(EngineError, match="ended with"):
            DashboardBenchmark("dummy:tiny", CONFIG, OPTIONS, server).measure("dashboard 2", 2)


def test_a_server_that_does_not_start_is_the_figures_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    options = argparse.Namespace(**vars(OPTIONS) | {"dashboard_batches": [1, 2]})
    figures = list(dashboard_figures("dummy:tiny", CONFIG, options))
    assert [figure.name for figure in figures] == ["dashboard 1", "dashboard 2"]
    assert all(figure.median is None for figure in figures)
    assert all("the dashboard's process ended with 1" in (figure.error or "") for figure in figures)


def test_only_steps_in_which_all_requests_decode_count() -> None:
    times = [1.0, 1.5, 1.75, 2.75, 3.0, 5.0, 5.5]
    prefill = [16, 0, 0, 8, 0, 0, 0]
    output = [1, 2, 2, 2, 2, 1, 2]
    steps = [
        {"end_time": end, "num_prefill_tokens": tokens, "num_output_tokens": made}
        for end, tokens, made in zip(times, prefill, output, strict=True)
    ]
    assert decode_intervals(steps, 2) == [0.5, 0.25, 0.25, 0.5]


def test_it_is_a_kind_of_the_benchmark_that_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, EngineConfig, argparse.Namespace]] = []

    def figures(model: str, config: EngineConfig, options: argparse.Namespace) -> Iterator[Figure]:
        asked.append((model, config, options))
        yield Figure.of(model, "dashboard 3", "share", [0.98])

    monkeypatch.setattr(dashboard, "dashboard_figures", figures)
    path = tmp_path / "result.json"
    arguments = ["--model", "dummy:tiny", "--set", "model.device=cpu", "-o", str(path)]
    engine.main(["--only", "dashboard", "--dashboard-batches", "3", "--dashboard-clients", "2", *arguments])
    (model, config, options) = asked.pop()
    assert (model, config.model.name, config.model.device) == ("dummy:tiny", "dummy:tiny", "cpu")
    assert (options.dashboard_batches, options.dashboard_clients) == ([3], 2)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [(figure["name"], figure["median"]) for figure in result["figures"]] == [("dashboard 3", 0.98)]
    assert result["models"] == {}, "the server has the model, and this process none"
    assert "dashboard" not in engine.parse([]).only
