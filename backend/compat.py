"""Guards for the surroundings that ServeLab runs in: a foreign `kernels` package, and OpenMP's way of waiting."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from backend.errors import ServeLabError

_REPOSITORY = Path(__file__).resolve().parents[1]


def check_kernels_package() -> None:
    """Make sure that `import kernels` gives our package. Call it before the first import of transformers.

    Hugging Face publishes a distribution that is also called `kernels`. Where it is installed, either it shadows our
    ops, or transformers finds our package in its place and fails on import; no environment variable prevents that.

    Raises:
        ServeLabError: a distribution `kernels` is installed, or the importable package is not ours.
    """
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise ServeLabError(
            f"the package `kernels` {version} is installed and clashes with ServeLab's own package of that name; "
            "remove it with: pip uninstall kernels"
        )
    spec = importlib.util.find_spec("kernels")
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if origin is None or _REPOSITORY not in origin.parents:
        raise ServeLabError(
            f"`import kernels` gives {origin or 'nothing'} where ServeLab needs {_REPOSITORY / 'kernels'}; "
            f"install ServeLab with: pip install -e {_REPOSITORY}"
        )


def configure_cpu_environment() -> None:
    """Let OpenMP threads sleep while they wait. Takes effect only before torch is first imported.

    A thread that spins at a barrier takes its core from the dashboard in the same process: two spinning threads beside
    one busy process run the default model at a third of its speed. A value set by the user stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
