"""Checks of kernels on a machine without a GPU: Triton's interpreter, in a process of its own.

Triton decides between compiling and interpreting when a kernel is defined, so one process cannot do both; and the
interpreter is slow, so it gets the small default inputs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backend.errors import ServeLabError

_REPOSITORY = Path(__file__).resolve().parents[2]


def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_interpreted(ops: Sequence[str], dtype: str, cancel: threading.Event) -> Iterator[dict[str, Any]]:
    """Yield the fields of a `kernels.check.KernelCheck` per op, as they come; `cancel` ends the process.

    Raises `ServeLabError` when it ends before it has checked them all.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kernels.check", *ops, "--dtype", dtype]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, cwd=_REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        watcher = threading.Thread(target=_kill_on_cancel, args=(process, cancel), daemon=True)
        watcher.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            process.kill()
            watcher.join()
        if code != 0 and not cancel.is_set():
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise ServeLabError(f"the check of kernels broke off: {lines[-1] if lines else f'exit code {code}'}")


def _kill_on_cancel(process: subprocess.Popen[bytes], cancel: threading.Event) -> None:
    while process.poll() is None:
        if cancel.wait(0.1):
            process.kill()
