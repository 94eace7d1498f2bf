"""Timing calls so that the figure can be believed.

Rules: the first calls (compiling, allocating) are left out; every timed call finds its inputs out of cache and writes
to memory that no recent call wrote; CUDA calls are timed on the device, between events, and launched from a CUDA graph,
so that the host's time to launch is not in the figure; on the CPU the clock is `time.perf_counter`, which never jumps.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, cloned

NUM_WARM_UP_CALLS = 3
NUM_SAMPLES = 25
MIN_CALLS_PER_GRAPH = 20
# Inputs are walked through until they exceed the cache by this factor.
CACHE_MULTIPLE = 4
# A CPU's last cache is not asked for: what this times CACHE_MULTIPLE gives exceeds most.
CPU_CACHE_BYTES = 32 * 2**20
# Copies beyond these would cost more than they tell; the cache is then swept before each walk.
MAX_COPIES = 512
MAX_ROTATION_BYTES = {"cuda": 4 * 2**30, "cpu": 2**29}

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one call: median, and where the middle 60 % of the samples lie (linear interpolation)."""

    p20: float
    p50: float
    p80: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Rotation:
    """Inputs to take one after another, so that none is found in a cache.

    Attributes:
        copies: equal inputs in different memory.
        needs_sweep: one walk over them does not exceed the cache by itself.
    """

    copies: Sequence[Inputs]
    needs_sweep: bool


# A call that brings its own inputs, which no cache holds or of which that is no matter.
ONCE = Rotation([{}], needs_sweep=False)


def cache_bytes(device: torch.device) -> int:
    """The last cache before memory: a card's L2; of a CPU, `CPU_CACHE_BYTES`."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return CPU_CACHE_BYTES


def rotate(inputs: Inputs, bytes_moved: int, device: torch.device) -> Rotation:
    """`inputs` and copies that together move more than `CACHE_MULTIPLE` caches, as far as memory allows."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    wanted = CACHE_MULTIPLE * cache_bytes(device) // max(bytes_moved, 1) + 1
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    affordable = max(1, MAX_ROTATION_BYTES[device.type] // max(held, 1))
    calls = MAX_COPIES if device.type == "cuda" else NUM_WARM_UP_CALLS + NUM_SAMPLES
    number = min(wanted, affordable, calls)
    copies = [cloned(inputs) for _ in range(number - 1)]
    return Rotation([inputs, *copies], needs_sweep=number < wanted)


def time_call(call: Call, rotation: Rotation, device: torch.device, *, capture: bool) -> Spread:
    """Time `call(**inputs)` over a rotation.

    Args:
        capture: launch from a CUDA graph. A call that waits for the device cannot be captured; without a graph, a call
            of many short kernels includes the gaps that the host leaves between them. Ignored on the CPU.
    """
    return spread(call_seconds(call, rotation, device, calls_per_graph=MIN_CALLS_PER_GRAPH if capture else 0))


def call_seconds(call: Call, rotation: Rotation, device: torch.device, *, calls_per_graph: int) -> list[float]:
    """Seconds of one call, `NUM_SAMPLES` times.

    Args:
        calls_per_graph: launch so many at least from a CUDA graph and give their mean; 0: none, and always on the CPU.
    """
    if device.type == "cpu":
        return _cpu_seconds(call, rotation, device)
    if calls_per_graph:
        return _cuda_graph_seconds(call, rotation, device, calls_per_graph)
    return _cuda_event_seconds(call, rotation, device)


def spread(seconds: Sequence[float]) -> Spread:
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(quantiles).tolist()
    return Spread(p20, p50, p80, len(seconds))


def _cpu_seconds(call: Call, rotation: Rotation, device: torch.device) -> list[float]:
    """One sample per call."""
    sweep = _sweeper(rotation, device)
    kept: deque[Any] = deque(maxlen=len(rotation.copies))  # outputs too must not land in memory that is in a cache
    seconds = []
    for index in range(NUM_WARM_UP_CALLS + NUM_SAMPLES):
        place = index % len(rotation.copies)
        if place == 0:
            sweep()
        begin = time.perf_counter()
        output = call(**rotation.copies[place])
        seconds.append(time.perf_counter() - begin)
        kept.append(output)
    return seconds[NUM_WARM_UP_CALLS:]


def _cuda_event_seconds(call: Call, rotation: Rotation, device: torch.device) -> list[float]:
    """One sample per call, between two events."""
    sweep = _sweeper(rotation, device)
    walk = itertools.cycle(rotation.copies)
    kept: deque[Any] = deque(maxlen=len(rotation.copies))
    events = []
    for _ in range(NUM_WARM_UP_CALLS + NUM_SAMPLES):
        sweep()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept.append(call(**next(walk)))
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in events[NUM_WARM_UP_CALLS:]]


def _cuda_graph_seconds(call: Call, rotation: Rotation, device: torch.device, min_calls: int) -> list[float]:
    """One sample per walk over the rotation: the mean of its calls, which run back to back."""
    copies = rotation.copies
    # A rotation that has to be swept is cold for one walk only.
    walks = 1 if rotation.needs_sweep else -(-min_calls // len(copies))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be filling the inputs
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UP_CALLS):
            call(**copies[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept: deque[Any] = deque(maxlen=len(copies))
    with torch.cuda.graph(graph):
        for inputs in itertools.chain.from_iterable(itertools.repeat(copies, walks)):
            kept.append(call(**inputs))
    num_calls = walks * len(copies)
    replay = Rotation([{}], rotation.needs_sweep)
    return [seconds / num_calls for seconds in _cuda_event_seconds(graph.replay, replay, device)]


def _sweeper(rotation: Rotation, device: torch.device) -> Callable[[], None]:
    """Drives everything else out of the cache by reading; reading leaves nothing that has to be written back later."""
    if not rotation.needs_sweep:
        return lambda: None
    buffer = torch.zeros((CACHE_MULTIPLE + 1) * cache_bytes(device) // 4, dtype=torch.float32, device=device)
    total = torch.zeros((), dtype=torch.float32, device=device)

    def sweep() -> None:
        torch.sum(buffer, dim=0, out=total)

    return sweep
