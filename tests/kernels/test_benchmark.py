from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.benchmark as benchmark
from kernels.registry import REGISTRY


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: replace(op, shapes={"small": {}}) for name, op in REGISTRY.items()}
    monkeypatch.setattr(benchmark, "REGISTRY", small)
    monkeypatch.setattr(benchmark, "CPU_ROTATION_BYTES", 2**18)
    monkeypatch.setattr(benchmark, "measure_copy_limit", lambda device: 1e9)


@pytest.mark.usefixtures("quick")
def test_times_every_reference_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--device", "cpu", "--json"])
    timings = json.loads(capsys.readouterr().out)
    assert [timing["op"] for timing in timings] == list(REGISTRY)
    for timing in timings:
        op = REGISTRY[timing["op"]]
        inputs = op.make_inputs(torch.float32, torch.device("cpu"))
        seconds = timing["p50_us"] / 1e6
        assert 0 < timing["p20_us"] <= timing["p50_us"] <= timing["p80_us"]
        assert timing["implementation"] == "reference"
        assert timing["gb_per_s"] == pytest.approx(op.bytes_moved(inputs) / seconds / 1e9)
        assert timing["tflop_per_s"] == pytest.approx(op.flops(inputs) / seconds / 1e12)
        assert timing["share_of_copy_limit"] == pytest.approx(op.bytes_moved(inputs) / seconds / 1e9)


@pytest.mark.usefixtures("quick")
def test_prints_a_line_per_shape(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["rms_norm", "--device", "cpu", "--dtype", "bfloat16"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["rms_norm", "small", "bfloat16", "reference"]


def test_first_calls_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []
    seconds = benchmark._cpu_seconds(lambda index: calls.append(index), [{"index": 0}, {"index": 1}])
    assert seconds == [1] * benchmark.NUM_SAMPLES
    assert len(calls) == benchmark.NUM_SAMPLES + benchmark.NUM_WARM_UP_CALLS
    assert calls[:4] == [0, 1, 0, 1]


def test_inputs_rotate_over_more_than_the_caches_hold() -> None:
    op = REGISTRY["rms_norm"]
    inputs = op.make_inputs(torch.float32, torch.device("cpu"), num_tokens=1024, hidden=4096)
    rotation = benchmark._rotation(inputs, op.bytes_moved(inputs), torch.device("cpu"))
    assert len(rotation) * op.bytes_moved(inputs) > benchmark.CPU_ROTATION_BYTES
    assert len({copy["x"].data_ptr() for copy in rotation}) == len(rotation)


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


@pytest.mark.gpu
@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_times_every_kernel_on_a_gpu(op: Any) -> None:
    device = torch.device("cuda")
    copy_limit = benchmark.measure_copy_limit(device)
    assert copy_limit > 1e11
    for shape, sizes in op.shapes.items():
        timing = benchmark.time_op(
            op,
            implementation="launch",
            shape=shape,
            sizes=sizes,
            dtype=torch.bfloat16,
            device=device,
            copy_limit=copy_limit,
        )
        assert 0 < timing.p20_us <= timing.p50_us <= timing.p80_us
        assert timing.share_of_copy_limit < 1.2
