"""Runs with several samples of a prompt, or several priorities, on their pages and on the command line."""

from __future__ import annotations

import sys

import pytest

from app.cli_summary import print_summaries
from backend.config import EngineConfig
from backend.metrics.stats import RunEnd, summary_to_dict
from backend.metrics.summary import summarize
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from tests.app.pages import page
from tests.app.stored_runs import FakeServices, add_run, feed_start
from tests.db.records import make_request

# Records in the order in which they ended: sample 10 before sample 2.
SAMPLES = [
    make_request(index, request_id=f"run-{index}/{sample}", parent_id=f"run-{index}", priority=priority)
    for index, priority in ((1, 7), (0, -1))
    for sample in (10, 2, 0)
]


@pytest.fixture
def classes(services: FakeServices) -> FakeServices:
    """Run #1 has two prompts of different priorities, run #2 is plain."""
    config = EngineConfig()
    recorder = RunRecorder(services.database, services.repository.create(config.to_dict(), Workload().to_dict()))
    feed_start(recorder, config)
    for request in SAMPLES:
        recorder.on_request_finished(request)
    recorder.on_run_end(RunEnd("finished", 103.0, summarize(SAMPLES, slo_limits={})))
    recorder.close()
    add_run(services)
    return services


def test_requests_name_their_sample_and_priority(classes: FakeServices) -> None:
    table = page("detail", run="1", view="Requests").dataframe[0].value
    assert list(table["Request"]) == ["0/0", "0/2", "0/10", "1/0", "1/2", "1/10"]
    assert list(table["Priority"]) == [-1] * 3 + [7] * 3
    plain = page("detail", run="2", view="Requests").dataframe[0].value
    assert list(plain["Request"]) == ["0", "1", "2", "3"]
    assert "Priority" not in plain


def test_each_priority_has_its_own_ttft(classes: FakeServices) -> None:
    detail = page("detail", run="1", view="All figures")
    latencies = detail.dataframe[0].value.set_index("")
    assert (
        latencies.loc[["TTFT of priority -1", "TTFT of priority 7"], ["p50", "p99", "n"]].values.tolist()
        == [[1000, 1000, 3]] * 2
    )
    figures = detail.table[0].value.set_index("Figure")
    assert figures.loc["TTFT by priority", "Value"] == "-1: p50 1,000 ms, p99 1,000 ms; 7: p50 1,000 ms, p99 1,000 ms"
    assert figures.loc["Requests", "Value"] == "6"
    assert figures.loc["Input tokens", "Value"] == "14 tok"
    plain = page("detail", run="2", view="All figures")
    assert "TTFT by priority" not in list(plain.table[0].value["Figure"])
    assert len(plain.dataframe[0].value) == 4


def test_a_table_of_runs_has_the_classes_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    early = summary_to_dict(summarize(SAMPLES, slo_limits={}))
    late = summary_to_dict(
        summarize([make_request(0, priority=10), make_request(1, priority=7, arrival_time=100.0)], slo_limits={})
    )
    older = {name: value for name, value in late.items() if name != "ttft_ms_by_priority"}
    print_summaries({1: early, 2: late, 3: older}, sys.stdout)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("TTFT of")]
    assert [(row[3], row[4]) for row in rows] == [
        (f"{number},", quantile) for number in (-1, 7, 10) for quantile in ("p50", "p99")
    ]
    assert rows[0][5:] == ["1,000", "ms", "–", "–"]
    assert rows[2][5:] == ["1,000", "ms", "2,000", "ms", "–"]
