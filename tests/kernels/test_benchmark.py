from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.benchmark as benchmark
from kernels import limits, timing
from kernels.kernel_op import KernelOp
from kernels.registry import REGISTRY
from kernels.timing import ONCE, Rotation
from tests.kernels.benchmarking import CPU, FAST, Clock, bench


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (timing, benchmark):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def no_call_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on a machine that is busy with something else."""
    monkeypatch.setattr(benchmark, "CPU_CALL_S", math.inf)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: replace(op, shapes={"small": {}}) for name, op in REGISTRY.items()}
    monkeypatch.setattr(benchmark, "REGISTRY", small)
    monkeypatch.setattr(timing, "CPU_CACHE_BYTES", 2**16)
    monkeypatch.setattr(benchmark, "measure_limits", lambda device, dtype: replace(FAST, read_bytes_per_s=1e12))


# The command


@pytest.mark.usefixtures("quick")
def test_times_every_reference_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--device", "cpu", "--json"])
    timings = json.loads(capsys.readouterr().out)
    assert [item["op"] for item in timings] == list(REGISTRY)
    for item in timings:
        op = REGISTRY[item["op"]]
        inputs = op.make_inputs(torch.float32, CPU)
        seconds = item["p50_us"] / 1e6
        assert 0 < item["p20_us"] <= item["p50_us"] <= item["p80_us"]
        assert item["num_samples"] >= 20
        assert item["implementation"] == "reference"
        assert item["gb_per_s"] == pytest.approx(op.bytes_moved(inputs) / seconds / 1e9)
        assert item["tflop_per_s"] == pytest.approx(op.flops(inputs) / seconds / 1e12)
        assert item["share_of_limit"] == pytest.approx(op.bytes_moved(inputs) / seconds / 1e12)
        assert item["limited_by"] == "bandwidth"


@pytest.mark.usefixtures("quick")
def test_prints_a_line_per_shape(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["rms_norm", "--device", "cpu", "--dtype", "bfloat16"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["rms_norm", "small", "bfloat16", "reference"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown op nonsense; known are rms_norm"),
        (["--device", "cpu", "--implementation", "launch"], "kernels run on cuda only"),
    ],
)
def test_refuses_by_name(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert message in capsys.readouterr().err


# Timing


def test_first_calls_are_left_out(clock: Clock) -> None:
    """What a first call does once, compiling or allocating, moves no figure."""
    calls = itertools.count()
    spread = timing.time_call(
        lambda: clock.pass_by(20.0 if next(calls) < timing.NUM_WARM_UP_CALLS else 0.25), ONCE, CPU, capture=False
    )
    assert spread == timing.Spread(0.25, 0.25, 0.25, timing.NUM_SAMPLES)
    assert next(calls) == timing.NUM_SAMPLES + timing.NUM_WARM_UP_CALLS


def test_a_clock_that_is_set_back_changes_no_duration(clock: Clock) -> None:
    spread = timing.time_call(lambda: clock.pass_by(0.5), ONCE, CPU, capture=False)
    assert (spread.p20, spread.p50, spread.p80) == (0.5, 0.5, 0.5)


def test_spread_is_interpolated() -> None:
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == timing.Spread(2.0, 3.5, 5.0, 6)


def test_inputs_rotate_over_more_than_the_caches_hold() -> None:
    op = REGISTRY["rms_norm"]
    inputs = op.make_inputs(torch.float32, CPU, num_tokens=1024, hidden=4096)
    bytes_moved = op.bytes_moved(inputs)
    rotation = timing.rotate(inputs, bytes_moved, CPU)
    assert not rotation.needs_sweep
    assert len(rotation.copies) * bytes_moved > 4 * timing.cache_bytes(CPU)
    assert len({copy["x"].data_ptr() for copy in rotation.copies}) == len(rotation.copies)


def test_what_cannot_rotate_far_enough_is_swept_before_each_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = REGISTRY["rms_norm"].make_inputs(torch.float32, CPU)
    rotation = timing.rotate(inputs, 100, CPU)
    assert rotation.needs_sweep
    assert len(rotation.copies) == timing.NUM_WARM_UP_CALLS + timing.NUM_SAMPLES
    swept: list[int] = []
    monkeypatch.setattr(timing, "_sweeper", lambda rotation, device: lambda: swept.append(1))
    timing.time_call(lambda: None, Rotation([{}, {}], needs_sweep=True), CPU, capture=False)
    assert len(swept) == (timing.NUM_WARM_UP_CALLS + timing.NUM_SAMPLES) // 2


def test_outputs_of_a_walk_do_not_share_memory() -> None:
    """Else all of them but the first would be written to a cache."""
    places: list[int] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        output = x + 1
        places.append(output.data_ptr())
        return output

    copies = [{"x": torch.zeros(1000)} for _ in range(5)]
    timing.time_call(call, Rotation(copies, needs_sweep=False), CPU, capture=False)
    assert all(len(set(places[start : start + 5])) == 5 for start in range(0, 25, 5))


# Limits


def test_a_figure_above_the_read_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(FAST, read_bytes_per_s=1.0)
    with pytest.raises(
        benchmark.ImplausibleTimingError, match=r"GB/s cannot be: .* was measured at 0 GB/s it reads at most"
    ):
        bench(monkeypatch, slow).time_shape(REGISTRY["rms_norm"], "reference", "default", {})


def test_a_figure_above_the_matmul_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(FAST, matmul_flops_per_s=1.0)
    with pytest.raises(benchmark.ImplausibleTimingError, match="TFLOP/s it multiplies at most"):
        bench(monkeypatch, slow).time_shape(REGISTRY["rms_norm"], "reference", "default", {})


@pytest.mark.parametrize("limited_by", ["bandwidth", "matmul"])
@pytest.mark.parametrize("share", [1.04, 1.06])
def test_a_limit_may_be_exceeded_by_five_percent(
    share: float, limited_by: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^30 bytes and operations in half a second, against limits that make of one of them this share, of the other half."""

    def reference(**inputs: Any) -> None:
        clock.pass_by(0.5)

    op = replace(REGISTRY["rms_norm"], reference=reference, bytes_moved=lambda i: 2**30, flops=lambda i: 2**30)
    bandwidth, matmul = (2**31 / (share if limited_by == it else 0.5) for it in ("bandwidth", "matmul"))
    monkeypatch.setattr(benchmark, "CPU_FLOPS", 2**30)
    session = bench(monkeypatch, replace(FAST, read_bytes_per_s=bandwidth, matmul_flops_per_s=matmul))
    if share > 1.05:
        with pytest.raises(benchmark.ImplausibleTimingError):
            session.time_shape(op, "reference", "default", {})
        return
    timed = session.time_shape(op, "reference", "default", {})
    assert (timed.share_of_limit, timed.limited_by) == (pytest.approx(share), limited_by)


def test_a_limit_that_a_busy_moment_made_too_low_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench(monkeypatch, replace(FAST, read_bytes_per_s=1.0), FAST)
    timed = session.time_shape(REGISTRY["rms_norm"], "reference", "default", {})
    assert timed.share_of_limit < 1
    assert timed.read_limit_gb_per_s == 1e6


def test_limits_are_work_over_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each call: the copy, which reads and writes, is the faster of the two that use the memory."""
    clock.tick = 0.5
    monkeypatch.setitem(limits.READ_BYTES, "cpu", 2**20)
    monkeypatch.setitem(limits.MATMUL_SIZE, "cpu", 128)
    measured = limits.measure_limits(CPU, torch.float32)
    assert measured.read_bytes_per_s == 2 * 2**20 / 0.5
    assert measured.matmul_flops_per_s == 2 * 128**3 / 0.5


def test_one_broken_op_is_an_error_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**inputs: Any) -> None:
        raise RuntimeError("broken")

    op = replace(REGISTRY["rms_norm"], shapes={"small": {}}, reference=broken)
    result, _ = bench(monkeypatch, FAST).time_shapes(op, "reference")
    assert isinstance(result, benchmark.Omission)
    assert (result.reason, result.is_error) == ("RuntimeError: broken", True)


# On a GPU


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("capture", [False, True])
def test_agrees_with_events_around_many_calls(capture: bool) -> None:
    """A kernel that counts cycles, and so heats nothing and is held back by nothing, timed call by call and fifty at once."""
    device = torch.device("cuda")
    timed = timing.time_call(lambda: torch.cuda._sleep(400_000), ONCE, device, capture=capture).p50
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(50):
        torch.cuda._sleep(400_000)
    end.record()
    torch.cuda.synchronize()
    assert timed == pytest.approx(begin.elapsed_time(end) / 1e3 / 50, rel=0.1)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_times_every_kernel_on_a_gpu(op: KernelOp) -> None:
    session = benchmark.Benchmark(torch.device("cuda"), torch.bfloat16)
    for result in session.time_shapes(op, "launch"):
        assert isinstance(result, benchmark.KernelTiming), result
        assert 0 < result.p20_us <= result.p50_us <= result.p80_us
        assert result.share_of_limit <= benchmark.PLAUSIBLE_SHARE
