"""What a benchmark leaves out on a CPU, and how little it takes to find out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.benchmark as benchmark
from kernels import timing
from kernels.registry import REGISTRY
from tests.kernels.benchmarking import FAST, Clock, bench


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


def test_a_shape_too_large_for_a_cpu_is_left_out_before_its_memory_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    huge = {"huge": {"num_tokens": 2**30, "hidden": 2**20}}
    op = replace(REGISTRY["rms_norm"], shapes=huge)
    omitted, default = bench(monkeypatch, FAST).time_shapes(op, "reference")
    assert isinstance(omitted, benchmark.Omission)
    assert (omitted.shape, omitted.is_error) == ("huge", False)
    assert "64 MiB are too large for a CPU" in omitted.reason
    assert isinstance(default, benchmark.KernelTiming), "an op none of whose shapes fits is timed on small inputs"
    assert default.shape == benchmark.DEFAULT_SHAPE


@pytest.mark.parametrize("name", ["int_linear", "nf4_linear"])
def test_words_of_random_bits_count_as_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 117 million codes: to unpack them takes seconds, so they are not even made."""
    op = REGISTRY[name]
    large = {shape: sizes for shape, sizes in op.shapes.items() if "4096 to 28672" in shape}
    never = replace(op, shapes=large, reference=lambda **inputs: pytest.fail("it was called"))
    omitted = list(itertools.islice(bench(monkeypatch, FAST).time_shapes(never, "reference"), len(large)))
    assert len(omitted) >= 3
    for omission in omitted:
        assert isinstance(omission, benchmark.Omission)
        assert (omission.is_error, "64 MiB are too large for a CPU" in omission.reason) == (False, True)


def test_a_shape_with_too_much_arithmetic_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    op = replace(
        REGISTRY["rms_norm"],
        shapes={"heavy": {}, "light": {"num_tokens": 1}},
        flops=lambda i: 2**40 * (len(i["x"]) > 1),
    )
    heavy, light = bench(monkeypatch, FAST).time_shapes(op, "reference")
    assert isinstance(heavy, benchmark.Omission)
    assert "GFLOP a call are too many" in heavy.reason
    assert isinstance(light, benchmark.KernelTiming)


def test_a_shape_that_takes_long_is_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CPU_CALL_S", 0.005)

    def slow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        clock.pass_by(0.01 if len(x) > 1 else 0.001)
        return x

    op = replace(REGISTRY["rms_norm"], shapes={"slow": {}, "quick": {"num_tokens": 1}}, reference=slow)
    omitted, timed = bench(monkeypatch, FAST).time_shapes(op, "reference")
    assert isinstance(omitted, benchmark.Omission)
    assert (omitted.reason, omitted.is_error) == ("a call takes 5 ms or more on this CPU", False)
    assert isinstance(timed, benchmark.KernelTiming)


def test_a_first_call_is_stopped_between_two_ops_once_it_takes_ten_times_too_long(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call of ten times the limit may be one that allocates, and the second decides."""
    monkeypatch.setattr(benchmark, "CPU_CALL_S", 0.25)
    num_calls, num_ops = itertools.count(), itertools.count()

    def in_steps(first: float, later: float) -> Any:
        def reference(x: torch.Tensor, **others: Any) -> torch.Tensor:
            seconds = later if next(num_calls) else first
            for _ in range(10):
                x = x + 1
                next(num_ops)
                clock.pass_by(seconds / 10)
            return x

        return replace(REGISTRY["rms_norm"], reference=reference)

    session = bench(monkeypatch, FAST)
    with pytest.raises(benchmark.OverBudgetError, match="a call takes 250 ms or more on this CPU"):
        session.time_shape(in_steps(first=100.0, later=100.0), "reference", "default", {})
    assert (next(num_calls), next(num_ops)) == (1, 1)
    num_calls, num_ops = itertools.count(), itertools.count()
    timed = session.time_shape(in_steps(first=2.5, later=0.15625), "reference", "default", {})
    assert timed.p50_us == 156_250
