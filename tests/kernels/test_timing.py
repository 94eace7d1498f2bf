"""The timer against a machine whose times are known: a device that runs behind its host, and a cache that forgets.

Each way to be fooled (TristanBilot/mlx-benchmark#21, pytorch/pytorch#177765, SakanaAI/robust-kbench#5) gives a wrong figure
here: taking the launch for the run, reading an event before it has happened, a first call that compiles, inputs that the
call before left in the cache, a sweep of the cache within the measured time, a clock that is set back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import timing

LAUNCH_S, CACHED_S, UNCACHED_S, COMPILE_S, SWEEP_S = 2.0**-20, 2.0**-12, 2.0**-8, 32.0, 4.0
CACHE_BYTES, INPUT_BYTES = 4096, 1024


class Machine:
    """In place of `time` and of `torch.cuda`. Work goes into a queue that runs when somebody waits for it; a CPU's at once.

    It stands for its own streams and graphs: while it captures, work goes into the graph in place of the queue.
    """

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.host_s = self.device_s = 0.0
        self.queue: list[Callable[[], None]] = []
        self.graph: list[Callable[[], None]] | None = None
        self.cache: OrderedDict[int, int] = OrderedDict()  # address -> bytes, the one used longest ago first
        self.num_calls = 0

    # -- time

    def perf_counter(self) -> float:
        return self.host_s

    def time(self) -> float:
        return 1e9 - 3600 * self.host_s  # set back again and again

    # -- work

    def submit(self, work: Callable[[], None]) -> None:
        if self.graph is not None:
            self.graph.append(work)
            return
        self.queue.append(work)
        self.host_s += LAUNCH_S
        if not self.is_cuda:
            self.synchronize()

    def synchronize(self, device: Any = None) -> None:
        self.device_s = max(self.device_s, self.host_s)
        for work in self.queue:
            work()
        self.queue.clear()
        self.host_s = self.device_s

    def read(self, tensor: Tensor) -> None:
        """Takes its time, and drives out what was used longest ago."""
        address = tensor.data_ptr()
        self.device_s += CACHED_S if address in self.cache else UNCACHED_S
        self.cache[address] = tensor.nbytes
        self.cache.move_to_end(address)
        while sum(self.cache.values()) > CACHE_BYTES:
            self.cache.popitem(last=False)

    def call(self, x: Tensor) -> None:
        """What is timed: it reads `x`; the first call compiles, on the host and, as a first launch may, on the device."""
        self.num_calls += 1
        if self.num_calls == 1:
            self.host_s += COMPILE_S
            self.submit(lambda: self.pass_by(COMPILE_S))
        self.submit(lambda: self.read(x))

    def pass_by(self, seconds: float) -> None:
        self.device_s += seconds

    def sweep(self, buffer: Tensor, **arguments: Any) -> None:
        def work() -> None:
            self.device_s += SWEEP_S
            if buffer.nbytes > CACHE_BYTES:
                self.cache.clear()

        self.submit(work)

    # -- streams and graphs

    def wait_stream(self, stream: Any) -> None:
        pass

    def replay(self) -> None:
        assert self.captured, "a graph that is empty"
        for work in self.captured:
            self.queue.append(work)
        self.host_s += LAUNCH_S

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        assert self.num_calls, "compiling cannot be captured"
        assert not self.queue, "capturing while work is under way"
        self.graph = []
        yield
        self.captured, self.graph = self.graph, None

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        yield


class Event:
    """Of a machine: the time on its device when the queue gets there."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at: float | None = None

    def record(self) -> None:
        self.machine.queue.append(lambda: setattr(self, "at", self.machine.device_s))

    def elapsed_time(self, other: Event) -> float:
        if self.at is None or other.at is None:
            raise RuntimeError("an event that has not happened yet was asked for its time")
        return (other.at - self.at) * 1e3


@pytest.fixture(params=["cpu", "cuda events", "cuda graph"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(request.param != "cpu")
    zeros = torch.zeros
    for name, value in {
        "Event": lambda enable_timing: Event(machine),
        "synchronize": machine.synchronize,
        "Stream": lambda device: machine,
        "current_stream": lambda device: machine,
        "stream": machine.on_stream,
        "CUDAGraph": lambda: machine,
        "graph": machine.capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch, "sum", machine.sweep)
    monkeypatch.setattr(timing, "time", machine)
    monkeypatch.setattr(timing, "cache_bytes", lambda device: CACHE_BYTES)
    return machine


@pytest.fixture
def seconds(machine: Machine, request: pytest.FixtureRequest) -> Callable[[], list[float]]:
    """Times `machine.call` on one input, and what `rotate` makes of it."""
    device = torch.device("cuda" if machine.is_cuda else "cpu")
    calls_per_graph = 20 if request.node.callspec.params["machine"] == "cuda graph" else 0

    def run() -> list[float]:
        rotation = timing.rotate({"x": torch.ones(INPUT_BYTES // 4)}, INPUT_BYTES, device)
        return timing.call_seconds(machine.call, rotation, device, calls_per_graph=calls_per_graph)

    return run


def assert_all_uncached(machine: Machine, samples: list[float]) -> None:
    """Each sample is one call that found nothing in the cache; a CPU's clock sees its launch as well."""
    assert len(samples) == timing.NUM_SAMPLES
    assert samples == pytest.approx([UNCACHED_S + (0 if machine.is_cuda else LAUNCH_S)] * len(samples), rel=1e-9)


def test_a_figure_is_the_run_of_a_call_that_finds_nothing_in_the_cache(
    machine: Machine, seconds: Callable[[], list[float]]
) -> None:
    assert_all_uncached(machine, seconds())


def test_where_inputs_cannot_rotate_far_enough_the_cache_is_swept_outside_the_figure(
    machine: Machine, seconds: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "MAX_ROTATION_BYTES", dict.fromkeys(timing.MAX_ROTATION_BYTES, 3 * INPUT_BYTES))
    assert_all_uncached(machine, seconds())


@pytest.mark.parametrize("machine", ["cpu"], indirect=True)
def test_the_machine_would_notice_a_call_timed_in_the_cache(machine: Machine) -> None:
    rotation = timing.Rotation([{"x": torch.ones(INPUT_BYTES // 4)}], needs_sweep=False)
    samples = timing.call_seconds(machine.call, rotation, torch.device("cpu"), calls_per_graph=0)
    assert samples == pytest.approx([CACHED_S + LAUNCH_S] * len(samples))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_bytes", [600, 1000, 1024, 4096, 16_383, 16_384, 16_385])
def test_a_walk_over_the_inputs_moves_more_than_four_caches_and_no_copy_too_many(
    num_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: CACHE_BYTES)
    rotation = timing.rotate({"x": torch.ones(num_bytes, dtype=torch.uint8)}, num_bytes, torch.device(device))
    assert not rotation.needs_sweep
    num_copies = len({copy["x"].data_ptr() for copy in rotation.copies})
    assert num_copies == len(rotation.copies)
    assert (num_copies - 1) * num_bytes <= 4 * CACHE_BYTES < num_copies * num_bytes
