from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.experiments.compare import Comparison, MetricRow, compare_runs
from backend.workload.spec import Workload


@dataclass(frozen=True)
class StoredRun:
    run_id: int
    summary: dict[str, Any] | None
    config: dict[str, Any] = field(default_factory=lambda: EngineConfig().to_dict())
    resolved_config: dict[str, Any] | None = None
    workload: dict[str, Any] = field(default_factory=lambda: Workload().to_dict())
    status: str = "finished"
    label: str | None = None
    kind: str = "serve"


def row(comparison: Comparison, metric: str) -> MetricRow:
    return next(row for row in comparison.metrics if row.metric == metric)


def test_differences_are_relative_to_the_baseline_and_judged_by_the_metric() -> None:
    runs = [
        StoredRun(1, {"output_throughput_tok_s": 100.0, "ttft_ms": {"p50": 40.0, "p99": 50.0}, "output_tokens": 10}),
        StoredRun(2, {"output_throughput_tok_s": 142.0, "ttft_ms": {"p50": 32.8, "p99": 50.0}, "output_tokens": 12}),
        StoredRun(3, {"output_throughput_tok_s": 82.0, "ttft_ms": {"p50": 48.0, "p99": 75.0}, "output_tokens": 10}),
    ]
    comparison = compare_runs(runs)
    assert comparison.baseline == 1
    throughput = row(comparison, "output_throughput_tok_s")
    assert throughput.differences == (None, pytest.approx(0.42), pytest.approx(-0.18))
    assert throughput.verdicts == (None, "better", "worse")
    ttft = row(comparison, "ttft_ms.p50")
    assert ttft.differences == (None, pytest.approx(-0.18), pytest.approx(0.2))
    assert ttft.verdicts == (None, "better", "worse")
    assert row(comparison, "ttft_ms.p99").verdicts == (None, "equal", "worse")
    assert row(comparison, "output_tokens").verdicts == (None, None, None)
    assert row(comparison, "output_tokens").differences == (None, pytest.approx(0.2), 0)


def test_any_run_can_be_the_baseline() -> None:
    runs = [StoredRun(1, {"duration_s": 2.0}), StoredRun(2, {"duration_s": 4.0})]
    duration = row(compare_runs(runs, baseline=2), "duration_s")
    assert duration.differences == (pytest.approx(-0.5), None)
    assert duration.verdicts == ("better", None)


def test_what_a_run_does_not_have_stays_none() -> None:
    runs = [
        StoredRun(1, {"tpot_ms": {"p50": None, "p99": None}, "preemptions": 0, "goodput_req_s": None}),
        StoredRun(2, {"tpot_ms": {"p50": 9.0, "p99": 9.5}, "preemptions": 3, "goodput_req_s": None}),
    ]
    comparison = compare_runs(runs)
    tpot = row(comparison, "tpot_ms.p50")
    assert (tpot.values, tpot.differences, tpot.verdicts) == ((None, 9.0), (None, None), (None, None))
    preemptions = row(comparison, "preemptions")
    assert preemptions.differences == (None, None), "no percentage of nothing"
    assert preemptions.verdicts == (None, "worse")
    assert "goodput_req_s" not in {metric.metric for metric in comparison.metrics}
    json.dumps(comparison.to_dict(), allow_nan=False)


def test_only_settings_that_differ_are_listed() -> None:
    small = EngineConfig().with_overrides({"cache.block_size": 8}).to_dict()
    fixed = Workload().to_dict()
    uniform = Workload().with_overrides({"output_len": {"kind": "uniform", "min": 4, "max": 8}}).to_dict()
    runs = [StoredRun(1, {}, workload=fixed), StoredRun(2, {}, config=small, workload=uniform)]
    settings = {row.key: row.values for row in compare_runs(runs).settings}
    assert settings == {
        "cache.block_size": (16, 8),
        "workload.output_len": (64, None),
        "workload.output_len.kind": (None, "uniform"),
        "workload.output_len.min": (None, 4),
        "workload.output_len.max": (None, 8),
    }


def test_resolved_settings_are_compared_only_where_every_run_has_them() -> None:
    asked = EngineConfig().to_dict()
    resolved = EngineConfig().resolve(device="cpu", max_model_len=8192).to_dict()
    both = [StoredRun(1, {}, resolved_config=resolved), StoredRun(2, {}, config=asked, resolved_config=resolved)]
    assert compare_runs(both).settings == ()
    mixed = [StoredRun(1, {}, resolved_config=resolved), StoredRun(2, {}, resolved_config=None)]
    assert compare_runs(mixed).settings == ()


@pytest.mark.parametrize(
    ("runs", "baseline", "message"),
    [
        ([StoredRun(1, {})], None, "at least two"),
        ([StoredRun(1, {}), StoredRun(1, {})], None, "#1 given more than once"),
        ([StoredRun(1, {}), StoredRun(2, None, status="cancelled")], None, "run #2 is cancelled; only finished"),
        ([StoredRun(1, {}), StoredRun(2, {})], 7, "#7 is not among the compared runs: #1, #2"),
    ],
)
def test_what_cannot_be_compared_is_named(runs: list[StoredRun], baseline: int | None, message: str) -> None:
    with pytest.raises(ServeLabError, match=message):
        compare_runs(runs, baseline)
