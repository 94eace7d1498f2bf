"""Times registered ops and holds each figure against what the device can do at most.

`python -m kernels.benchmark [OP ...] [--implementation launch|reference] [--json]` needs torch alone (and triton for
kernels). `kernels.timing` says by which rules calls are timed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.kernel_op import Inputs, KernelOp
from kernels.limits import device_name, dtype_name, measure_byte_matmul, measure_limits
from kernels.registry import REGISTRY
from kernels.timing import rotate, time_call

Implementation = Literal["launch", "reference"]

# A measured limit is not exact; beyond this factor a figure is not a fast kernel but a wrong measurement.
PLAUSIBLE_SHARE = 1.05
# Shapes are chosen for GPUs. On a CPU those are left out that would take it long: all ops together are done in seconds.
CPU_INPUT_BYTES = 2**26
CPU_FLOPS = 10**9
CPU_CALL_S = 0.03
# A first call may allocate and start threads. One that takes so many times as long is stopped on its way.
CPU_FIRST_CALL = 10
DEFAULT_SHAPE = "default"  # what `make_inputs` makes when told nothing: small


class ImplausibleTimingError(ValueError):
    """A figure above what the device can do: the measurement is wrong, or `bytes_moved` or `flops` of the op is."""


class OverBudgetError(ValueError):
    """Inputs or arithmetic too large for this device."""


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Time of one call, what it amounts to, and the limits it was held against."""

    op: str
    implementation: Implementation
    shape: str
    dtype: str
    device: str
    num_samples: int
    p20_us: float
    p50_us: float
    p80_us: float
    bytes_moved: int
    flops: int
    gb_per_s: float
    tflop_per_s: float
    read_limit_gb_per_s: float
    matmul_limit_tflop_per_s: float
    share_of_limit: float  # the larger of the shares of the read limit and of the matmul limit
    limited_by: Literal["bandwidth", "matmul"]  # which of the two it is


@dataclass(frozen=True, slots=True)
class Omission:
    """Why an op has no timing for a shape; `is_error` when that is no matter of this device's size."""

    op: str
    implementation: Implementation
    shape: str
    dtype: str
    reason: str
    is_error: bool


class Benchmark:
    """Times ops in one dtype on one device, whose limits it measures first."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.limits = measure_limits(device, dtype)
        self._byte_matmul: float | None = None

    def time_shapes(self, op: KernelOp, implementation: Implementation) -> Iterator[KernelTiming | Omission]:
        """Every shape of `op`, or why not; on a CPU that can take none of them, the default inputs too."""
        timed = False
        for shape, sizes in op.shapes.items():
            result = self._result(op, implementation, shape, sizes)
            timed = timed or isinstance(result, KernelTiming)
            yield result
        if not timed and self.device.type == "cpu":
            yield self._result(op, implementation, DEFAULT_SHAPE, {})

    def time_shape(
        self, op: KernelOp, implementation: Implementation, shape: str, sizes: Mapping[str, Any]
    ) -> KernelTiming:
        """Time `op` on inputs of `sizes`.

        Args:
            shape: what to call the sizes in the result.
        Raises:
            OverBudgetError: the inputs, the arithmetic or the time of a call are too much for a CPU.
            ImplausibleTimingError: the figure is above `PLAUSIBLE_SHARE` of a limit, also after a second measurement of it.
        """
        inputs = self._inputs(op, sizes)
        bytes_moved, flops = op.bytes_moved(inputs), op.flops(inputs)
        if self.device.type == "cpu" and flops > CPU_FLOPS:
            raise OverBudgetError(f"{flops / 1e9:,.1f} GFLOP a call are too many for a CPU")
        call = op.launch if implementation == "launch" else op.reference
        if self.device.type == "cpu":
            _refuse_slow(call, inputs)
        # A reference may wait for the device, which a graph cannot hold.
        capture = call is not op.reference and not op.waits
        spread = time_call(call, rotate(inputs, bytes_moved, self.device), self.device, capture=capture)
        share, limited_by = self._share(op, bytes_moved, flops, spread.p50)
        if share > PLAUSIBLE_SHARE:
            self.limits = self.limits.highest(measure_limits(self.device, self.dtype))
            if op.has_byte_codes and self._byte_matmul is not None:
                self._byte_matmul = max(self._byte_matmul, measure_byte_matmul(self.device))
            share, limited_by = self._share(op, bytes_moved, flops, spread.p50)
        timing = KernelTiming(
            op=op.name,
            implementation=implementation,
            shape=shape,
            dtype=dtype_name(self.dtype),
            device=device_name(self.device),
            num_samples=spread.num_samples,
            p20_us=spread.p20 * 1e6,
            p50_us=spread.p50 * 1e6,
            p80_us=spread.p80 * 1e6,
            bytes_moved=bytes_moved,
            flops=flops,
            gb_per_s=bytes_moved / spread.p50 / 1e9,
            tflop_per_s=flops / spread.p50 / 1e12,
            read_limit_gb_per_s=self.limits.read_bytes_per_s / 1e9,
            matmul_limit_tflop_per_s=self._matmul_limit(op) / 1e12,
            share_of_limit=share,
            limited_by=limited_by,
        )
        if share > PLAUSIBLE_SHARE:
            raise ImplausibleTimingError(_implausible(timing))
        return timing

    def _result(
        self, op: KernelOp, implementation: Implementation, shape: str, sizes: Mapping[str, Any]
    ) -> KernelTiming | Omission:
        try:
            return self.time_shape(op, implementation, shape, sizes)
        except OverBudgetError as error:
            reason, is_error = str(error), False
        except torch.OutOfMemoryError:
            reason, is_error = "it does not fit this card's free memory", False
        except ImplausibleTimingError as error:
            reason, is_error = str(error), True
        except Exception as error:  # one broken op must not cost the others their figures
            reason, is_error = f"{type(error).__name__}: {error}", True
        return Omission(op.name, implementation, shape, dtype_name(self.dtype), reason, is_error)

    def _inputs(self, op: KernelOp, sizes: Mapping[str, Any]) -> Inputs:
        if self.device.type == "cuda":
            return op.make_inputs(self.dtype, self.device, **sizes)
        with _AllocationLimit(CPU_INPUT_BYTES):
            return op.make_inputs(self.dtype, self.device, **sizes)

    def _matmul_limit(self, op: KernelOp) -> float:
        """Of what `op` multiplies; a CPU has no faster way for codes."""
        if not op.has_byte_codes or self.device.type == "cpu":
            return self.limits.matmul_flops_per_s
        if self._byte_matmul is None:
            self._byte_matmul = measure_byte_matmul(self.device)
        return self._byte_matmul

    def _share(
        self, op: KernelOp, bytes_moved: int, flops: int, seconds: float
    ) -> tuple[float, Literal["bandwidth", "matmul"]]:
        bandwidth = bytes_moved / seconds / self.limits.read_bytes_per_s
        matmul = flops / seconds / self._matmul_limit(op)
        return (bandwidth, "bandwidth") if bandwidth >= matmul else (matmul, "matmul")


def _refuse_slow(call: Callable[..., Any], inputs: Inputs) -> None:
    """Raise OverBudgetError when a second call takes longer than `CPU_CALL_S`, or the first one `CPU_FIRST_CALL` times that."""
    with _TimeLimit(CPU_FIRST_CALL * CPU_CALL_S):
        call(**inputs)
    begin = time.perf_counter()
    call(**inputs)
    if time.perf_counter() - begin > CPU_CALL_S:
        raise _too_slow()


def _too_slow() -> OverBudgetError:
    return OverBudgetError(f"a call takes {CPU_CALL_S * 1e3:g} ms or more on this CPU")


class _TimeLimit(TorchDispatchMode):
    """Within, no torch op begins once the time is over: it raises instead."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.perf_counter() + seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.perf_counter() > self._end:
            raise _too_slow()
        return func(*args, **(kwargs or {}))


class _AllocationLimit(TorchDispatchMode):
    """Within, a tensor that takes the total over a limit raises before its memory is asked for."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._limit = num_bytes
        self._total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._total += _allocated_bytes(func, args, kwargs)
        if self._total > self._limit:
            raise OverBudgetError(f"inputs of more than {self._limit // 2**20} MiB are too large for a CPU")
        return func(*args, **kwargs)


def _allocated_bytes(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Of the tensor that an op makes of a size alone; 0 for an op that takes a tensor."""
    names = [argument.name for argument in func._schema.arguments]
    if "size" not in names or "self" in names:
        return 0
    default = torch.int64 if func._schema.name == "aten::randint" else torch.get_default_dtype()
    return math.prod(args[names.index("size")]) * (kwargs.get("dtype") or default).itemsize


def _implausible(timing: KernelTiming) -> str:
    if timing.limited_by == "bandwidth":
        rate, limit = f"{timing.gb_per_s:,.0f} GB/s", f"{timing.read_limit_gb_per_s:,.0f} GB/s it reads"
    else:
        rate, limit = (
            f"{timing.tflop_per_s:,.2f} TFLOP/s",
            f"{timing.matmul_limit_tflop_per_s:,.2f} TFLOP/s it multiplies",
        )
    return (
        f"{rate} cannot be: {timing.device} was measured at {limit} at most, so the timing or the op's count is wrong"
    )


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

    dtype = getattr(torch, options.dtype or ("bfloat16" if on_cuda else "float32"))
    benchmark = Benchmark(torch.device(options.device), dtype)
    timings, failures = [], []
    for name in options.ops or REGISTRY:
        for result in benchmark.time_shapes(REGISTRY[name], implementation):
            if isinstance(result, KernelTiming):
                timings.append(result)
                line = _line(result)
            else:
                failures += [result] if result.is_error else []
                line = (
                    f"{result.op:16} {result.shape:34} {'FAILED' if result.is_error else 'left out'}: {result.reason}"
                )
            if not options.json:
                print(line, flush=True)
    if options.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))
    if failures:
        parser.exit(1, "".join(f"error: {failure.op}, {failure.shape}: {failure.reason}\n" for failure in failures))


def _line(timing: KernelTiming) -> str:
    return (
        f"{timing.op:16} {timing.shape:34} {timing.dtype:9} {timing.implementation:10}"
        f"{timing.p20_us:10.1f} {timing.p50_us:10.1f} {timing.p80_us:10.1f} us"
        f"{timing.gb_per_s:9.1f} GB/s {timing.tflop_per_s:8.3f} TFLOP/s"
        f" {timing.share_of_limit:6.1%} of the {timing.limited_by} limit"
    )


if __name__ == "__main__":
    main()
