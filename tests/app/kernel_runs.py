"""Plausible kernel runs for the pages and the command line to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.services import Services
from backend.metrics.stats import RunEnd, RunStart, RunStatus
from db.recorder import RunRecorder

LIMITS = {
    "device": "NVIDIA H100",
    "cache_bytes": 2**26,
    "read_limit_gb_per_s": 3000.0,
    "matmul_limit_tflop_per_s": 700.0,
}
COMMON = {"dtype": "bfloat16", "device": "NVIDIA H100"}


def check_result(op: str, **changes: Any) -> dict[str, Any]:
    check = {"experiment": "check", "op": op, "implementation": "launch", "shape": "default", "interpreted": False}
    errors = {"passed": True, "max_abs_error": 0.004, "max_rel_error": 0.001, "atol": 0.01, "rtol": 0.01}
    return COMMON | check | errors | changes


def bench_result(op: str, shape: str = "decode", p50_us: float = 10.0, **changes: Any) -> dict[str, Any]:
    """Moves 15 MB and does 30 MFLOP."""
    seconds = p50_us / 1e6
    rates = {
        "bytes_moved": 15_000_000,
        "flops": 30_000_000,
        "gb_per_s": 15e6 / seconds / 1e9,
        "tflop_per_s": 30e6 / seconds / 1e12,
        "read_limit_gb_per_s": LIMITS["read_limit_gb_per_s"],
        "matmul_limit_tflop_per_s": LIMITS["matmul_limit_tflop_per_s"],
        "share_of_limit": 15e6 / seconds / 3e12,
        "limited_by": "bandwidth",
    }
    times = {"num_samples": 25, "p20_us": p50_us * 0.98, "p50_us": p50_us, "p80_us": p50_us * 1.02}
    what = {"experiment": "bench", "op": op, "implementation": "launch", "shape": shape}
    return COMMON | what | times | rates | changes


def attention_result(implementation: str, length: int) -> dict[str, Any]:
    what = {"experiment": "attention", "op": "attention", "implementation": implementation, "shape": f"{length} tokens"}
    return COMMON | what | {"length": length, "p50_us": length / 10, "peak_memory_bytes": length * 1024}


def add_kernel_run(
    services: Services,
    results: Sequence[dict[str, Any]] = (check_result("rms_norm"), bench_result("rms_norm")),
    *,
    experiments: Sequence[str] = ("check", "bench"),
    label: str | None = None,
    status: RunStatus = "finished",
    error: str | None = None,
    notices: tuple[str, ...] = (),
) -> int:
    """Store a run of the lab that has ended."""
    config = {"experiments": list(experiments), "ops": None, "dtype": None, "implementation": "both"}
    run_id = services.repository.create(config, {}, label, kind="kernels")
    recorder = RunRecorder(services.database, run_id)
    environment = {"gpu": "NVIDIA H100", "versions": {"torch": "2.11.0", "triton": "3.6.0"}, "commit": "abc"}
    load = LIMITS if "bench" in experiments else {}
    resolved = config | {"ops": ["rms_norm"], "dtype": "bfloat16"}
    recorder.on_run_start(RunStart(100.0, resolved, environment, load, notices, {}, 0))
    for result in results:
        services.repository.add_kernel_result(run_id, result)
    recorder.on_run_end(RunEnd(status, 101.0, None, error))
    recorder.close()
    return run_id
