"""Times registered ops: `python -m kernels.benchmark [OP ...] [--implementation launch|reference] [--json]`.

On CUDA an op walks over copies of its inputs that together exceed four times the L2 cache, so that none is found there,
and the calls of one walk run as a CUDA graph, so that the host's time to launch them is not measured. The first calls
(compiling, allocating) are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp
from kernels.registry import REGISTRY

Implementation = Literal["launch", "reference"]

NUM_WARM_UP_CALLS = 3
NUM_SAMPLES = 40
MIN_CALLS_PER_GRAPH = 20
L2_MULTIPLE = 4
# A CPU's caches are not asked for: this exceeds those of most.
CPU_ROTATION_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Time of one call, and what it amounts to."""

    op: str
    implementation: Implementation
    shape: str
    dtype: str
    device: str
    num_samples: int
    p20_us: float
    p50_us: float
    p80_us: float
    gb_per_s: float
    tflop_per_s: float
    # Bytes per second over those of a plain copy on this device.
    share_of_copy_limit: float


def time_op(
    op: KernelOp,
    *,
    implementation: Implementation,
    shape: str,
    sizes: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    copy_limit: float,
) -> KernelTiming:
    """Time `op` on inputs of `sizes`.

    Args:
        shape: what to call the sizes in the result.
        copy_limit: bytes/s of a plain copy, from `measure_copy_limit`.
    """
    inputs = op.make_inputs(dtype, device, **sizes)
    bytes_moved, flops = op.bytes_moved(inputs), op.flops(inputs)
    rotation = _rotation(inputs, bytes_moved, device)
    call = op.launch if implementation == "launch" else op.reference
    if device.type == "cpu":
        seconds = _cpu_seconds(call, rotation)
    elif implementation == "launch":
        seconds = _cuda_graph_seconds(call, rotation)
    else:
        # A reference may wait for the device, which a graph cannot hold.
        seconds = _cuda_event_seconds(call, rotation)
    p20, p50, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return KernelTiming(
        op=op.name,
        implementation=implementation,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        device=_device_name(device),
        num_samples=len(seconds),
        p20_us=p20 * 1e6,
        p50_us=p50 * 1e6,
        p80_us=p80 * 1e6,
        gb_per_s=bytes_moved / p50 / 1e9,
        tflop_per_s=flops / p50 / 1e12,
        share_of_copy_limit=bytes_moved / p50 / copy_limit,
    )


def measure_copy_limit(device: torch.device) -> float:
    """Bytes per second, read and written, of a device-to-device copy that fits no cache."""
    num_bytes = 2**30 if device.type == "cuda" else 2**27
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    measure = _cuda_event_seconds if device.type == "cuda" else _cpu_seconds
    seconds = measure(lambda source, target: target.copy_(source), [{"source": source, "target": target}])
    return 2 * num_bytes / sorted(seconds)[len(seconds) // 2]


def _rotation(inputs: Inputs, bytes_moved: int, device: torch.device) -> list[Inputs]:
    """`inputs` and copies of it that together move more than the caches hold."""
    if device.type == "cuda":
        total = L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size
    else:
        total = CPU_ROTATION_BYTES
    copies = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        for _ in range(total // bytes_moved)
    ]
    return [inputs, *copies]


def _cpu_seconds(call: Callable[..., Any], rotation: list[Inputs]) -> list[float]:
    """One sample per call."""
    walk = itertools.cycle(rotation)
    for _ in range(NUM_WARM_UP_CALLS):
        call(**next(walk))
    seconds = []
    for _ in range(NUM_SAMPLES):
        inputs = next(walk)
        begin = time.perf_counter()
        call(**inputs)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _cuda_event_seconds(call: Callable[..., Any], rotation: list[Inputs]) -> list[float]:
    """One sample per call, between two events; short calls include the host's time to launch them."""
    walk = itertools.cycle(rotation)
    for _ in range(NUM_WARM_UP_CALLS):
        call(**next(walk))
    events = []
    for _ in range(NUM_SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(**next(walk))
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _cuda_graph_seconds(call: Callable[..., Any], rotation: list[Inputs]) -> list[float]:
    """One sample per walk over the rotation: the mean of its calls, which run back to back."""
    walks = -(-MIN_CALLS_PER_GRAPH // len(rotation))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UP_CALLS):
            call(**rotation[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in rotation * walks:
            call(**inputs)
    return [seconds / (walks * len(rotation)) for seconds in _cuda_event_seconds(graph.replay, [{}])]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.benchmark", description="Time registered ops.")
    has_cuda = torch.cuda.is_available()
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(REGISTRY)}; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--implementation", choices=("launch", "reference"), help="default: launch on cuda only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on cuda only")
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout instead of lines")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(REGISTRY):
        parser.error(f"unknown op {', '.join(sorted(unknown))}; known are {', '.join(REGISTRY)}")
    if options.device == "cuda" and not has_cuda:
        parser.error("torch finds no CUDA device; use --device cpu")
    on_cuda = options.device == "cuda"
    implementation = options.implementation or ("launch" if on_cuda else "reference")
    if implementation == "launch" and not on_cuda:
        parser.error("kernels run on cuda only; on a cpu use --implementation reference")

    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_cuda else "float32"))
    copy_limit = measure_copy_limit(device)
    timings = []
    for name in options.ops or REGISTRY:
        for shape, sizes in REGISTRY[name].shapes.items():
            timing = time_op(
                REGISTRY[name],
                implementation=implementation,
                shape=shape,
                sizes=sizes,
                dtype=dtype,
                device=device,
                copy_limit=copy_limit,
            )
            timings.append(timing)
            if not options.json:
                print(_line(timing), flush=True)
    if options.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))


def _line(timing: KernelTiming) -> str:
    return (
        f"{timing.op:16} {timing.shape:34} {timing.dtype:9} {timing.implementation:10}"
        f"{timing.p20_us:10.1f} {timing.p50_us:10.1f} {timing.p80_us:10.1f} us"
        f"{timing.gb_per_s:9.1f} GB/s {timing.tflop_per_s:8.3f} TFLOP/s {timing.share_of_copy_limit:6.1%} of a copy"
    )


if __name__ == "__main__":
    main()
