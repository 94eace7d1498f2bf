"""`servelab doctor`: is everything here that ServeLab needs, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from app import formatting, terminal
from app.cli_options import JsonOption
from backend.errors import ServeLabError

_MIN_FREE_BYTES = 2 * 10**9  # the default model's download, conversion and result, with room to spare


@dataclass(frozen=True, slots=True)
class _Result:
    check: str
    ok: bool
    detail: str  # what was found, or what is wrong


def doctor(as_json: JsonOption = False) -> None:
    """Check Python, torch, CUDA, Triton, packages, the database and the models folder."""
    with terminal.results() as out:
        results = [_run(name, check) for name, check in _CHECKS.items()]
        if as_json:
            terminal.write_document(out, [asdict(result) for result in results])
        else:
            rows = [(result.check, "ok" if result.ok else "PROBLEM", result.detail) for result in results]
            terminal.print_table(("Check", "", ""), rows, "l", out)
    problems = [result.check for result in results if not result.ok]
    if problems:
        raise ServeLabError(f"{len(problems)} of {len(results)} checks found a problem: {', '.join(problems)}")


def _run(name: str, check: Callable[[], str]) -> _Result:
    try:
        return _Result(name, True, check())
    except Exception as error:  # a broken installation can fail in any way; the other checks still say something
        detail = str(error) if isinstance(error, ServeLabError) else f"{type(error).__name__}: {error}"
        return _Result(name, False, " ".join(detail.split()))


def _python() -> str:
    return f"{platform.python_version()}, {sys.executable}"


def _packages() -> str:
    from backend.compat import check_kernels_package

    check_kernels_package()
    names = ("servelab", "transformers", "streamlit")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _torch() -> str:
    from backend.compat import configure_cpu_environment
    from backend.config import default_cpu_threads

    configure_cpu_environment()
    import torch

    return f"{torch.__version__}, {default_cpu_threads()} of {len(os.sched_getaffinity(0))} cores for CPU math"


def _cuda() -> str:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{device.name} with {formatting.memory(device.total_memory)}" for device in devices)
    card = _nvidia_card()
    if card:
        raise ServeLabError(f"the machine has an {card}, but torch {torch.__version__} finds no CUDA device; check the "
                            "driver, and that torch is a CUDA build")  # fmt: skip
    return "no CUDA device; the engine runs on the CPU"


def _nvidia_card() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _triton() -> str:
    import torch

    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        if torch.cuda.is_available():
            raise ServeLabError("not installed, but there is a CUDA device; reinstall torch") from None
        return "not installed; only a CUDA device, `servelab kernels check` and the tests need it"
    import triton  # noqa: F401  a half-installed one fails here

    return version


def _database() -> str:
    from app.services import Services

    with Services.open() as services:
        return services.database.url


def _models() -> str:
    from backend.models import sources
    from backend.paths import models_home

    home = models_home()
    existing = next(folder for folder in (home, *home.parents) if folder.is_dir())
    if not os.access(existing, os.W_OK):
        raise ServeLabError(f"{existing} cannot be written to; set SERVELAB_HOME to a folder that can")
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        raise ServeLabError(
            f"{home}: {formatting.file_size(free)} free; at least {formatting.file_size(_MIN_FREE_BYTES)} are needed"
        )
    states = ", ".join(f"{model.name} {model.state}" for model in sources.list_models() if model.state != "built in")
    return f"{home}, {formatting.file_size(free)} free; {states}"


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "CUDA": _cuda,
    "triton": _triton,
    "database": _database,
    "models": _models,
}
