"""`servelab kernels` from the command line to the database, on small inputs."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.benchmark as benchmark
from app.services import Services
from backend.experiments import kernel_lab
from kernels import limits, timing
from kernels.kernel_op import Tolerance
from kernels.registry import REGISTRY
from tests.app.command_line import Cli
from tests.app.kernel_runs import add_kernel_run, bench_result, check_result
from tests.app.stored_runs import add_run

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes an op, one of them too large, and limits that cost nothing to measure. A busy moment changes no outcome."""
    for name in ("rms_norm", "silu_and_mul"):
        shapes = {"small": {}, "large": {"num_tokens": 2**24}}
        monkeypatch.setitem(REGISTRY, name, replace(REGISTRY[name], shapes=shapes))
    fast = limits.Limits("cpu", "float32", 2**16, 1e12, 1e14)
    monkeypatch.setattr(benchmark, "measure_limits", lambda device, dtype: fast)
    monkeypatch.setattr(benchmark, "CPU_CALL_S", math.inf)
    monkeypatch.setattr(timing, "CPU_CACHE_BYTES", 2**16)


def runs() -> list[Any]:
    with Services.open() as services:
        return services.repository.list()


def test_ops_are_listed(cli: Cli) -> None:
    code, out, _ = cli("kernels", "list", "--json")
    document = json.loads(out)
    assert (code, [op["name"] for op in document["ops"]]) == (0, list(REGISTRY))
    assert set(document["ops"][0]) == {"name", "purpose", "dtypes", "shapes", "mutates"}
    assert document["triton"].endswith(".")
    code, out, _ = cli("kernels", "list")
    assert code == 0
    assert all(name in out for name in REGISTRY)


@on_cpu
@pytest.mark.usefixtures("quick")
def test_bench_prints_one_document_and_records_a_run(cli: Cli) -> None:
    code, out, err = cli("kernels", "bench", "rms_norm", "silu_and_mul", "--json", "--label", "first")
    document = json.loads(out)
    assert code == 0, err
    assert (document["run_id"], document["status"], document["error"]) == (1, "finished", None)
    assert kernel_lab.CPU_BENCH in document["notices"]
    timed = [row for row in document["results"] if row["p50_us"] is not None]
    assert {row["op"] for row in timed} == {"rms_norm", "silu_and_mul"}
    for row in timed:
        assert row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["num_samples"] >= 20
        assert row["gb_per_s"] == pytest.approx(row["bytes_moved"] / row["p50_us"] / 1e3)
        assert row["share_of_limit"] <= benchmark.PLAUSIBLE_SHARE
    skipped = [row for row in document["results"] if row["p50_us"] is None]
    assert all("too large for a CPU" in row["problem"] for row in skipped)
    assert err.splitlines()[0] == "run #1 first"
    (run,) = runs()
    assert (run.kind, run.label, run.status, run.model) == ("kernels", "first", "finished", "")
    assert run.environment["versions"]["torch"] == torch.__version__
    assert run.load["read_limit_gb_per_s"] == document["limits"]["read_limit_gb_per_s"]


@on_cpu
@pytest.mark.usefixtures("quick")
def test_bench_without_storing_leaves_no_run(cli: Cli) -> None:
    code, out, err = cli("kernels", "bench", "rms_norm", "--no-store")
    assert code == 0
    assert "rms_norm" in out
    assert "GB/s read" in out
    assert "left out: rms_norm (reference)" in err
    assert kernel_lab.CPU_BENCH in err
    assert runs() == []


@on_cpu
def test_check_runs_through_the_interpreter_and_records_nothing(cli: Cli) -> None:
    pytest.importorskip("triton")
    code, out, _ = cli("kernels", "check", "rms_norm", "--json")
    document = json.loads(out)
    (result,) = document["results"]
    assert (code, result["passed"], result["interpreted"], document["run_id"]) == (0, True, True, None)
    assert result["max_abs_error"] <= result["atol"] + result["rtol"] * 10
    assert runs() == []


@on_cpu
def test_a_check_that_fails_is_exit_code_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = check_result("rms_norm", passed=False, interpreted=True, problem="3 elements of output are wrong")
    monkeypatch.setattr(kernel_lab, "check_interpreted", lambda ops, dtype, cancel: iter([failed]))
    code, out, err = cli("kernels", "check", "rms_norm", "--json")
    assert code == 1
    assert json.loads(out)["results"][0]["passed"] is False
    assert err.splitlines()[-1] == "error: rms_norm, default: 3 elements of output are wrong"
    code, out, _ = cli("kernels", "check", "rms_norm")
    assert (code, "FAILED" in out) == (1, True)


@on_cpu
@pytest.mark.usefixtures("quick")
def test_a_figure_that_cannot_be_is_exit_code_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    op = replace(REGISTRY["rms_norm"], shapes={"s": {}}, bytes_moved=lambda inputs: 10**15)
    monkeypatch.setitem(REGISTRY, "rms_norm", op)
    code, out, err = cli("kernels", "bench", "rms_norm", "--no-store", "--json")
    assert code == 1
    assert json.loads(out)["status"] == "failed"
    assert "GB/s cannot be: " in err.splitlines()[-1]


@on_cpu
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "nonsense"], "there is no op nonsense; there are: rms_norm"),
        (["bench", "--implementation", "launch"], "timed on a CUDA device"),
        (["check", "--dtype", "bfloat16"], "bfloat16 matrices wrongly"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli: Cli, arguments: list[str], said: str) -> None:
    code, out, err = cli("kernels", *arguments, "--json")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert said in err
    assert runs() == []


def test_an_op_without_the_dtype_is_left_out_and_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    only = replace(REGISTRY["rms_norm"], tolerances={torch.float16: Tolerance(0.0, 0.0)})
    monkeypatch.setitem(REGISTRY, "rms_norm", only)
    monkeypatch.setattr(benchmark, "measure_limits", lambda *_: limits.Limits("x", "float32", 2**16, 1e15, 1e18))
    code, out, _ = cli("kernels", "bench", "rms_norm", "--dtype", "float32", "--no-store", "--json")
    document = json.loads(out)
    assert (code, document["results"]) == (0, [])
    assert "Left out, as they take no float32: rms_norm." in document["notices"]


# Kernel runs in the other commands


@pytest.fixture
def stored() -> None:
    with Services.open() as services:
        add_run(services)
        add_kernel_run(services, [check_result("rms_norm"), bench_result("rms_norm")], label="lab")


@pytest.mark.usefixtures("stored")
def test_runs_list_and_show_tell_the_kind(cli: Cli) -> None:
    assert [run["kind"] for run in json.loads(cli("runs", "list", "--json")[1])] == ["kernels", "serve"]
    assert "kernel lab" in cli("runs", "list")[1]
    code, out, _ = cli("runs", "show", "2")
    assert (code, "the kernel lab" in out, "read_limit_gb_per_s" in out) == (0, True, True)


@pytest.mark.usefixtures("stored")
def test_compare_refuses_a_kernel_run_by_name(cli: Cli) -> None:
    code, _, err = cli("compare", "1", "2")
    assert (code, err) == (1, "error: run #2 is the kernel lab's; the Kernels page compares such runs\n")


@pytest.mark.usefixtures("stored")
def test_kernel_runs_are_exported(cli: Cli) -> None:
    rows = list(csv.DictReader(io.StringIO(cli("export", "2", "--format", "csv", "-o", "-")[1])))
    assert [(row["experiment"], row["op"], row["passed"], row["p50_us"]) for row in rows] == [
        ("check", "rms_norm", "true", ""),
        ("bench", "rms_norm", "", "10.0"),
    ]
    rows = json.loads(cli("export", "1", "2", "--format", "json", "--table", "kernels", "-o", "-")[1])
    assert [row["run_id"] for row in rows] == [2, 2]
    serving, lab = json.loads(cli("export", "1", "2", "--format", "json", "-o", "-")[1])
    assert (serving["kind"], len(serving["requests"]), "kernels" in serving) == ("serve", 4, False)
    assert (lab["kind"], len(lab["kernels"]), "requests" in lab) == ("kernels", 2, False)


@pytest.mark.usefixtures("stored")
def test_deleting_a_kernel_run_takes_its_results_along(cli: Cli) -> None:
    assert cli("runs", "delete", "2", "--yes")[0] == 0
    with Services.open() as services:
        assert services.repository.kernel_results(2) == []
        assert services.repository.models() == ["smollm2-135m"]
