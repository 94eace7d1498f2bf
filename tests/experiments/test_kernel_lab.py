"""The lab on this machine, with the timing itself replaced: what it does with results, with failures, and when cancelled."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels.benchmark as benchmark
from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError, EngineError, ServeLabError
from backend.experiments import kernel_check, kernel_lab
from backend.experiments.kernel_config import KernelLabConfig
from backend.experiments.kernel_graphs import decode_step, graph_settings, newest_pair
from backend.experiments.kernel_lab import list_ops, resolve_lab, run_lab
from backend.experiments.kernel_results import compare_timings, left_out, timings
from backend.experiments.run_queue import RunQueue
from backend.metrics.live import LiveRun
from backend.metrics.stats import Phase, RunEnd, StatsSink
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from kernels import attention_lengths
from kernels.limits import Limits
from kernels.registry import REGISTRY
from tests.engine.driving import held
from tests.waiting import PATIENCE_S, until

OPS = list(REGISTRY)[:2]
PASSED = {
    "shape": "default",
    "dtype": "float32",
    "interpreted": True,
    "passed": True,
    "max_abs_error": 1e-7,
    "max_rel_error": 1e-7,
    "atol": 1e-6,
    "rtol": 1e-5,
    "problem": None,
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are the CPU's ways")


@pytest.fixture(autouse=True)
def no_call_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on a machine that is busy with something else."""
    monkeypatch.setattr(benchmark, "CPU_CALL_S", math.inf)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that cost nothing, checks that pass, one small shape an op."""
    monkeypatch.setattr(benchmark, "measure_limits", lambda device, dtype: Limits("cpu", "float32", 2**16, 1e15, 1e18))
    monkeypatch.setattr(
        kernel_lab, "check_interpreted", lambda ops, dtype, cancel: ({"op": name, **PASSED} for name in ops)
    )
    monkeypatch.setattr("kernels.timing.CPU_CACHE_BYTES", 2**14)
    for name in OPS:
        monkeypatch.setitem(REGISTRY, name, replace(REGISTRY[name], shapes={"small": {}}))


def lab(config: KernelLabConfig, cancel: threading.Event | None = None) -> tuple[RunEnd, list[dict[str, Any]], LiveRun]:
    results: list[dict[str, Any]] = []
    live = LiveRun(1)
    end = run_lab(config, live, results.append, cancel or threading.Event())
    return end, results, live


# A run


@pytest.mark.usefixtures("quick")
def test_a_cpu_checks_kernels_and_times_references() -> None:
    end, results, live = lab(KernelLabConfig(ops=tuple(OPS)))
    assert (end.status, end.error) == ("finished", None)
    assert [(row["experiment"], row["op"], row["implementation"]) for row in results] == [
        *(("check", name, "launch") for name in OPS),
        *(("bench", name, "reference") for name in OPS),
    ]
    assert all(row["p50_us"] > 0 and row["share_of_limit"] < 1 for row in results[2:])
    snapshot = live.snapshot()
    assert snapshot.notices == (kernel_lab.CPU_CHECK, kernel_lab.CPU_BENCH)
    assert snapshot.phase == Phase(f"timing {OPS[-1]},", 3, 4)


@pytest.mark.usefixtures("quick")
def test_a_kernel_outside_its_tolerance_fails_the_run_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = PASSED | {"passed": False, "problem": "3 of 6 elements of output are outside the tolerance"}
    monkeypatch.setattr(kernel_lab, "check_interpreted", lambda ops, dtype, cancel: iter([{"op": OPS[0], **wrong}]))
    end, results, _ = lab(KernelLabConfig(ops=tuple(OPS)))
    assert (end.status, end.error) == ("failed", f"{OPS[0]}, default: {wrong['problem']}")
    assert [row["experiment"] for row in results] == ["check", "bench", "bench"]


@pytest.mark.usefixtures("quick")
def test_a_figure_that_cannot_be_fails_the_run_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Limits("cpu", "float32", 2**16, 1.0, 1e18)
    monkeypatch.setattr(benchmark, "measure_limits", lambda device, dtype: slow)
    end, results, _ = lab(KernelLabConfig(experiments=("bench",), ops=tuple(OPS)))
    assert end.status == "failed"
    assert end.error is not None
    assert end.error.count("cannot be") >= 2
    assert all("p50_us" not in row for row in results)
    assert "cannot be" in left_out([{"p50_us": None, **row} for row in results])[0]


@pytest.mark.usefixtures("quick")
def test_a_cancelled_run_keeps_what_it_has() -> None:
    cancel = threading.Event()
    results: list[dict[str, Any]] = []

    def on_result(row: dict[str, Any]) -> None:
        results.append(row)
        cancel.set()

    end = run_lab(KernelLabConfig(ops=tuple(OPS)), LiveRun(1), on_result, cancel)
    assert (end.status, len(results)) == ("cancelled", 1)


@pytest.mark.usefixtures("quick")
def test_cancelled_while_kernels_are_checked_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    def check(ops: Sequence[str], dtype: str, cancel: threading.Event) -> Iterator[dict[str, Any]]:
        cancel.set()
        yield from ()

    monkeypatch.setattr(kernel_lab, "check_interpreted", check)
    end, results, _ = lab(KernelLabConfig(ops=tuple(OPS)), cancelled)
    assert (end.status, results) == ("cancelled", [])


@pytest.mark.usefixtures("quick")
def test_without_triton_references_are_timed_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_lab, "triton_is_installed", lambda: False)
    end, results, live = lab(KernelLabConfig(ops=tuple(OPS)))
    assert end.status == "finished"
    assert {row["experiment"] for row in results} == {"bench"}
    assert live.snapshot().notices[0] == kernel_lab.NO_TRITON
    with pytest.raises(ConfigError, match="Triton is not installed"):
        resolve_lab(KernelLabConfig(experiments=("check",)))


def test_the_attention_comparison_is_a_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_lengths.LENGTHS, "cpu", (16, 32))
    monkeypatch.setattr("kernels.timing.CPU_CACHE_BYTES", 2**14)
    end, results, live = lab(KernelLabConfig(experiments=("attention",)))
    assert end.status == "finished"
    assert [(row["length"], row["implementation"]) for row in results] == [
        (length, name) for length in (16, 32) for name in ("unfused", "fused, torch", "paged reference")
    ]
    assert live.snapshot().phase == Phase("comparing attention over 32 tokens,", 1, 2)


# What is asked


def test_a_cpu_refuses_what_it_cannot_do_by_name() -> None:
    with pytest.raises(ConfigError, match="there is no op nonsense; there are: "):
        resolve_lab(KernelLabConfig(ops=("nonsense",)))
    with pytest.raises(ConfigError, match="timed on a CUDA device"):
        resolve_lab(KernelLabConfig(implementation="launch"))
    with pytest.raises(ConfigError, match="bfloat16 matrices wrongly"):
        resolve_lab(KernelLabConfig(dtype="bfloat16"))
    assert resolve_lab(KernelLabConfig(experiments=("bench",), dtype="bfloat16")).dtype == "bfloat16"


def test_a_config_round_trips_and_is_strict() -> None:
    config = resolve_lab(KernelLabConfig())
    assert config.ops == tuple(REGISTRY)
    assert (config.dtype, config.implementation) == ("float32", "reference")
    assert KernelLabConfig.from_dict(config.to_dict()) == config
    for wrong in ({"experiments": []}, {"experiments": ["x"]}, {"ops": []}, {"dtype": "int8"}, {"more": 1}):
        with pytest.raises(ConfigError):
            KernelLabConfig.from_dict(wrong)


def test_every_op_is_listed_with_a_purpose() -> None:
    ops = list_ops()
    assert [op.name for op in ops] == list(REGISTRY)
    for op in ops:
        assert op.purpose.endswith(".")
        assert op.shapes
        assert set(op.dtypes) <= {"float32", "bfloat16", "float16"}


# Triton's interpreter in its own process


def test_checks_come_from_a_process_of_their_own() -> None:
    pytest.importorskip("triton")
    (check,) = kernel_check.check_interpreted(["rms_norm"], "float32", threading.Event())
    assert (check["op"], check["passed"], check["interpreted"]) == ("rms_norm", True, True)


def test_a_check_that_breaks_off_says_why() -> None:
    with pytest.raises(ServeLabError, match=r"broke off: .*unknown op nonsense"):
        list(kernel_check.check_interpreted(["nonsense"], "float32", threading.Event()))


def test_cancelling_ends_the_process() -> None:
    cancel = threading.Event()
    cancel.set()
    assert list(kernel_check.check_interpreted(OPS, "float32", cancel)) == []


# In the queue


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture
def queue(host: EngineHost) -> Iterator[RunQueue]:
    queue = RunQueue(host)
    yield queue
    queue.close()


def test_tasks_run_one_after_another(queue: RunQueue) -> None:
    running: list[int] = []
    seen: list[list[int]] = []

    def task(run_id: int) -> Callable[[StatsSink, threading.Event], RunEnd]:
        def run(sink: StatsSink, cancel: threading.Event) -> RunEnd:
            running.append(run_id)
            sink.on_phase(Phase("timing"))
            time.sleep(0.02)  # another one would come meanwhile
            seen.append(list(running))
            running.remove(run_id)
            return RunEnd("finished", time.perf_counter())

        return run

    for run_id in (1, 2):
        queue.submit_task(run_id, task(run_id), ())
    assert [end.status if (end := queue.wait(run_id, PATIENCE_S)) else None for run_id in (1, 2)] == ["finished"] * 2
    assert seen == [[1], [2]]
    with pytest.raises(EngineError, match="already submitted"):
        queue.submit_task(1, task(1), ())


def test_a_task_is_cancelled_and_one_that_raises_has_failed(queue: RunQueue) -> None:
    begun = threading.Event()

    def wait(sink: StatsSink, cancel: threading.Event) -> RunEnd:
        begun.set()
        return RunEnd("cancelled" if cancel.wait(PATIENCE_S) else "finished", time.perf_counter())

    def fail(sink: StatsSink, cancel: threading.Event) -> RunEnd:
        raise ServeLabError("no room")

    queue.submit_task(1, wait, ())
    queue.submit_task(2, fail, ())
    assert begun.wait(PATIENCE_S)
    assert queue.cancel(1)
    ends = [queue.wait(run_id, PATIENCE_S) for run_id in (1, 2)]
    assert [(end.status, end.error) for end in ends if end] == [("cancelled", None), ("failed", "no room")]


def test_a_task_has_the_device_and_its_thread_to_itself(host: EngineHost, queue: RunQueue) -> None:
    config = EngineConfig().with_overrides({"model.name": "dummy:tiny", "model.device": "cpu"})
    first = host.load(config)
    seen: list[object] = []

    def task(sink: StatsSink, cancel: threading.Event) -> RunEnd:
        seen.extend((threading.current_thread(), host.state, host.memory().weights_bytes))
        return RunEnd("finished", time.perf_counter())

    queue.submit_task(1, task, ())
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "finished"
    assert seen == [host.execute(threading.current_thread), "empty", 0]
    assert host.load(config) is not first


def test_a_task_is_refused_while_somebody_elses_requests_are_under_way(host: EngineHost, queue: RunQueue) -> None:
    host.load(EngineConfig().with_overrides({"model.name": "dummy:tiny", "model.device": "cpu"}))
    ended = threading.Event()

    def take(event: StreamEvent) -> None:
        if event.finish_reason is not None:
            ended.set()

    with held(host):
        host.submit("a", [1], SamplingParams(max_tokens=1000, ignore_eos=True), take)
        queue.submit_task(1, lambda sink, cancel: RunEnd("finished", 0.0), ())
        until(lambda: host._commands.qsize() == 2)
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert (end.status, end.error) == ("failed", "the engine is busy; requests under way: 1")
    host.abort("a")
    assert ended.wait(PATIENCE_S)


# Stored results


def bench_row(op: str, p50: float, shape: str = "s", spread: float = 0.0, **changes: Any) -> dict[str, Any]:
    row = {"experiment": "bench", "op": op, "shape": shape, "dtype": "float32", "implementation": "launch"}
    return row | {"p20_us": p50 - spread, "p50_us": p50, "p80_us": p50 + spread, "problem": None} | changes


def check_row(op: str, shape: str, error: float) -> dict[str, Any]:
    return {"experiment": "check", "op": op, **PASSED, "shape": shape, "max_abs_error": error, "p50_us": None}


def test_a_timing_has_the_error_of_its_own_shape_or_of_the_small_inputs() -> None:
    rows = timings(
        [
            check_row("a", "default", 1.0),
            check_row("a", "s", 2.0),
            *(bench_row("a", 1, s) for s in "st"),
            bench_row("b", 1),
        ]
    )
    assert [(row["op"], row["shape"], row["max_abs_error"]) for row in rows] == [
        ("a", "s", 2.0),
        ("a", "t", 1.0),
        ("b", "s", None),
    ]


def test_runs_are_compared_by_what_they_have_in_common() -> None:
    runs = [
        [bench_row("a", 10, spread=1), bench_row("b", 10, spread=1), bench_row("only here", 1)],
        [bench_row("b", 10.5, spread=1), bench_row("a", 5, spread=1)],
        [bench_row("a", 20), bench_row("b", 1, dtype="bfloat16")],
    ]
    a, b = compare_timings(runs)
    assert (a.op, a.p50_us, a.ratios, a.overlap) == ("a", (10, 5, 20), (1.0, 2.0, 0.5), (True, False, False))
    assert (b.op, b.p50_us, b.overlap) == ("b", (10, 10.5, None), (True, True, False))
    assert b.ratios[2] is None


def test_what_is_left_out_is_named_by_reason() -> None:
    rows: Sequence[dict[str, Any]] = [
        bench_row("a", 0, p50_us=None, problem="too large"),
        bench_row("b", 0, p50_us=None, problem="too large"),
        bench_row("c", 1),
    ]
    assert left_out(rows) == ["a s; b s: too large"]


# CUDA graphs on and off


def graph_run(run_id: int, eager: bool, asked: bool | None = None, seed: int = 0, num_blocks: int = 9) -> Any:
    configs, workload = graph_settings()
    config = configs[eager if asked is None else asked].to_dict()
    return SimpleNamespace(
        run_id=run_id,
        config=config,
        resolved_config=config | {"kernels": {"enforce_eager": eager}, "cache": {"num_blocks": num_blocks}},
        workload=workload.to_dict() | {"seed": seed},
    )


def test_the_newest_pair_differs_in_graphs_only() -> None:
    assert newest_pair([graph_run(4, True), graph_run(3, False, num_blocks=5), graph_run(1, False)]) == (3, 4)
    assert newest_pair([graph_run(4, False), graph_run(3, True)]) == (4, 3)
    assert newest_pair([graph_run(2, True), graph_run(1, False, seed=1)]) is None
    assert newest_pair([graph_run(2, True), graph_run(1, True, asked=False)]) is None, "neither ran with graphs"


def test_a_decode_step_is_the_median_of_those_without_prefill() -> None:
    def step(prefill: int, decode: int, schedule: float) -> dict[str, float]:
        return {
            "num_prefill_tokens": prefill,
            "num_decode_tokens": decode,
            "duration_ms": 10 * schedule,
            "schedule_ms": schedule,
            "process_ms": 0.5,
            "execute_ms": 2.0,
        }

    steps = [step(8, 0, 99), step(0, 8, 50), step(0, 8, 1), step(0, 8, 2), step(0, 8, 3), step(4, 8, 99)]
    typical = decode_step(steps)
    assert typical is not None
    assert (typical.duration_ms, typical.host_ms, typical.execute_ms, typical.num_steps) == (20, 2.5, 2.0, 3)
    assert decode_step(steps[:2]) is None
