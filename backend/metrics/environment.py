"""Where a run ran: machine, card, versions, commit. Gathered without importing what it reports on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from backend.metrics.gpu_monitor import GpuMonitor

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "servelab",
    "torch",
    "triton",
    "transformers",
    "streamlit",
    "numpy",
    "safetensors",
    "tokenizers",
    "llvmlite",
)


def environment(cpu_threads: int | None = None) -> dict[str, Any]:
    """Plain data for a run's record; None for what cannot be found out.

    Args:
        cpu_threads: threads the engine uses for CPU math, when it is known.
    """
    return {**_machine(), "cpu_threads": cpu_threads}


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    gpu = GpuMonitor.open()
    return {
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.memory_bytes if gpu else None,
        "gpu_driver": gpu.driver if gpu else None,
        "commit": _commit(),
    }


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of ServeLab's own checkout, with "-dirty" when files differ from it; None when it is no checkout."""
    if not (_REPOSITORY / ".git").exists():
        return None  # else git would find a repository further up that happens to hold an installed copy
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    surroundings = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # looking must not take the index's lock
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=1, env=surroundings)
        return done.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
