"""The kernel lab: checks ops against their references and times them, as one run of the queue.

On a CUDA machine Triton kernels are checked and timed beside their torch references. On a CPU only references are timed,
on the shapes it can take, and kernels are checked through Triton's interpreter on small inputs. A run says which it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from backend.config import default_cpu_threads
from backend.errors import ConfigError
from backend.experiments.kernel_check import check_interpreted, triton_is_installed
from backend.experiments.kernel_config import Experiment, KernelLabConfig
from backend.metrics.environment import environment
from backend.metrics.stats import Phase, RunEnd, RunStart, StatsSink

if TYPE_CHECKING:
    import torch

    from kernels.benchmark import Benchmark, Implementation
    from kernels.kernel_op import KernelOp

Result = dict[str, Any]  # by column of the results' table
OnResult = Callable[[Result], None]

CPU_CHECK = "No CUDA device: the kernels were checked through Triton's interpreter, on small inputs."
CPU_BENCH = "No CUDA device: the times are of the torch references on this CPU; Triton kernels are timed on a GPU only."
NO_TRITON = (
    "Triton is not installed, so no kernel was checked; on Linux: pip install 'triton>=3.6,<4', as `make test` does"
)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of a registered op without running it."""

    name: str
    purpose: str  # one line
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    mutates: tuple[str, ...]


def list_ops() -> list[OpInfo]:
    """Every registered op; imports torch, but no Triton."""
    from kernels.limits import dtype_name
    from kernels.registry import REGISTRY

    return [
        OpInfo(
            name=op.name,
            purpose=(op.reference.__doc__ or "").strip().splitlines()[0].strip(),
            dtypes=tuple(dtype_name(dtype) for dtype in op.tolerances),
            shapes=tuple(op.shapes),
            mutates=tuple(sorted(op.mutates)),
        )
        for op in REGISTRY.values()
    ]


def has_cuda() -> bool:
    """Whether kernels run on a GPU here; imports torch."""
    import torch

    return torch.cuda.is_available()


def triton_use() -> str:
    """Where Triton runs on this machine, in a sentence."""
    import torch

    if torch.cuda.is_available():
        return f"Triton kernels are compiled for {torch.cuda.get_device_name()}; references are torch on the same card."
    if triton_is_installed():
        return "No CUDA device: the engine uses the torch references, and kernels are checked in Triton's interpreter only."
    return "No CUDA device and no Triton: the engine uses the torch references, and kernels cannot be checked here."


def resolve_lab(config: KernelLabConfig) -> KernelLabConfig:
    """Fill in ops, dtype and implementation for this machine. Raises `ConfigError` naming what is impossible here."""
    import torch

    from kernels.registry import REGISTRY

    on_cuda = torch.cuda.is_available()
    ops = config.ops or tuple(REGISTRY)
    if unknown := [name for name in ops if name not in REGISTRY]:
        raise ConfigError(f"there is no op {', '.join(unknown)}; there are: {', '.join(REGISTRY)}")
    dtype = config.dtype or ("bfloat16" if on_cuda else "float32")
    implementation = config.implementation
    if not on_cuda:
        if config.experiments == ("check",) and not triton_is_installed():
            raise ConfigError(NO_TRITON)
        if "bench" in config.experiments and implementation == "launch":
            raise ConfigError(
                "Triton kernels are timed on a CUDA device, and torch finds none; time references instead"
            )
        if "check" in config.experiments and dtype == "bfloat16":
            raise ConfigError(
                "Triton's interpreter multiplies bfloat16 matrices wrongly, so a CPU checks float32 and float16 only"
            )
        implementation = "reference"
    changes = {"ops": list(dict.fromkeys(ops)), "dtype": dtype, "implementation": implementation}
    return config.with_overrides(changes)


def run_lab(config: KernelLabConfig, sink: StatsSink, on_result: OnResult, cancel: threading.Event) -> RunEnd:
    """Run every experiment of `config`; returns within one call of an op after `cancel`.

    Single ops that fail a check, or whose figure cannot be true, are results like others and make the run a failed one.

    Args:
        on_result: gets each result at once; nothing of a cancelled run is lost.
    """
    import torch

    resolved = resolve_lab(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(default_cpu_threads())
    sink.on_phase(Phase("measuring this machine's limits"))
    lab = _Lab(resolved, device, sink, on_result, cancel)
    sink.on_run_start(
        RunStart(
            start_time=time.perf_counter(),
            resolved_config=resolved.to_dict(),
            environment=environment(torch.get_num_threads() if device.type == "cpu" else None),
            load=lab.limits(),
            notices=tuple(lab.notices()),
            cache_state={},
            num_requests=0,
        )
    )
    finished = lab.run()
    error = "; ".join(lab.failures) or None
    status = "cancelled" if not finished else "failed" if error else "finished"
    return RunEnd(status, time.perf_counter(), error=error)


class _Lab:
    """One run of the lab on one device."""

    def __init__(
        self,
        config: KernelLabConfig,
        device: torch.device,
        sink: StatsSink,
        on_result: OnResult,
        cancel: threading.Event,
    ) -> None:
        import torch

        from kernels.benchmark import Benchmark
        from kernels.limits import device_name, dtype_name
        from kernels.registry import REGISTRY

        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.dtype or "float32")
        self._sink, self._on_result, self._cancel = sink, on_result, cancel
        self._experiments = config.experiments
        self._implementations: Sequence[Implementation] = (
            ("launch", "reference") if config.implementation == "both" else (config.implementation,)
        )
        named = [REGISTRY[name] for name in config.ops or ()]
        self._ops: list[KernelOp] = [op for op in named if self._dtype in op.tolerances]
        self._without_dtype = [op.name for op in named if self._dtype not in op.tolerances]
        self._benchmark: Benchmark | None = Benchmark(device, self._dtype) if "bench" in config.experiments else None
        self._can_check = device.type == "cuda" or triton_is_installed()
        self._dtype_name = dtype_name(self._dtype)
        self._device_name = device_name(device) if device.type == "cuda" else environment()["cpu"] or "CPU"
        self._done, self._total = 0, self._count()
        self.failures: list[str] = []  # of single ops; the others go on

    def limits(self) -> Mapping[str, Any]:
        """What the machine was measured to do; empty where nothing is held against it."""
        if self._benchmark is None:
            return {}
        limits = self._benchmark.limits
        return {
            "device": self._device_name,
            "cache_bytes": limits.cache_bytes,
            "read_limit_gb_per_s": limits.read_bytes_per_s / 1e9,
            "matmul_limit_tflop_per_s": limits.matmul_flops_per_s / 1e12,
        }

    def notices(self) -> Iterator[str]:
        if "check" in self._experiments and not self._can_check:
            yield NO_TRITON
        elif "check" in self._experiments and self._device.type == "cpu":
            yield CPU_CHECK
        if "bench" in self._experiments and self._device.type == "cpu":
            yield CPU_BENCH
        if self._without_dtype:
            yield f"Left out, as they take no {self._dtype_name}: {', '.join(self._without_dtype)}."

    def run(self) -> bool:
        """Whether all was done, and not cancelled before."""
        for experiment in self._experiments:
            for _ in {"check": self._check, "bench": self._bench, "attention": self._attention}[experiment]():
                if self._cancel.is_set():
                    return False
            if self._cancel.is_set():  # a process that was ended yields nothing more
                return False
        return True

    def _count(self) -> int:
        """Steps of progress: an op for each experiment, and a length of the attention comparison."""
        from kernels.attention_lengths import LENGTHS

        lengths = len(LENGTHS[self._device.type])
        sizes = {"check": len(self._ops) * self._can_check, "bench": len(self._ops), "attention": lengths}
        return sum(sizes[experiment] for experiment in self._experiments)

    def _begin(self, what: str) -> None:
        self._sink.on_phase(Phase(f"{what},", self._done, self._total))

    def _check(self) -> Iterator[None]:
        if not self._can_check or not self._ops:
            return
        if self._device.type == "cpu":
            self._begin("checking kernels in Triton's interpreter")
            for check in check_interpreted([op.name for op in self._ops], self._dtype_name, self._cancel):
                self._take_check(check)
                self._done += 1
                self._begin("checking kernels in Triton's interpreter")
                yield
            return
        from kernels.check import check_shapes

        for op in self._ops:
            self._begin(f"checking {op.name}")
            for check in check_shapes(op, self._dtype, self._device):
                self._take_check(asdict(check))
                yield
            self._done += 1

    def _take_check(self, check: Mapping[str, Any]) -> None:
        self._put("check", {**check, "implementation": "launch"})
        if not check["passed"]:
            self.failures.append(f"{check['op']}, {check['shape']}: {check['problem']}")

    def _bench(self) -> Iterator[None]:
        from kernels.benchmark import Omission

        assert self._benchmark is not None
        for op in self._ops:
            self._begin(f"timing {op.name}")
            for implementation in self._implementations:
                for result in self._benchmark.time_shapes(op, implementation):
                    row = asdict(result)
                    if isinstance(result, Omission):
                        row["problem"] = result.reason
                        if result.is_error:
                            self.failures.append(f"{op.name} ({implementation}), {result.shape}: {result.reason}")
                    self._put("bench", row)
                    yield
            self._done += 1

    def _attention(self) -> Iterator[None]:
        from kernels.attention_lengths import LENGTHS, attention_points

        for length in LENGTHS[self._device.type]:
            self._begin(f"comparing attention over {length:,} tokens")
            for point in attention_points(length, self._device, self._dtype):
                self._put("attention", {**asdict(point), "op": "attention", "shape": f"{length} tokens"})
                yield
            self._done += 1

    def _put(self, experiment: Experiment, result: Result) -> None:
        common = {"experiment": experiment, "dtype": self._dtype_name, "device": self._device_name}
        self._on_result(result | common)
