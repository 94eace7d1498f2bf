"""Fixtures and rules for all tests.

No test touches the user's database: `SERVELAB_DATABASE_URL` points into a temporary folder, one per test run and, within
a test, one per test. Models are shared with the user (`backend.paths.models_home`), so that a machine fetches them once.

No test fails because a machine is slow, or because of what ran before it: which files share a process is chance.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from backend.compat import configure_cpu_environment
from backend.models.sources import ModelSource, ensure_model

# Before anything imports torch: tests run beside each other, and tiny matrices gain nothing from more threads.
configure_cpu_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On top of what Hypothesis itself chooses, which is another profile in continuous integration.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_session_home = pytest.StashKey[Path]()


# What pytest and the libraries imported keep alive, some hundreds of thousands of objects, would be walked twice whenever a
# test loads an engine: half of the time of most that do. They are frozen once, with whatever is frozen later, for good.
_unfreeze = gc.unfreeze


def pytest_configure(config: pytest.Config) -> None:
    gc.unfreeze = lambda: None
    # Fixtures of a wider scope than one test, such as a running dashboard, are set up before `isolated_database`.
    home = config.stash[_session_home] = Path(tempfile.mkdtemp(prefix="servelab-tests-"))
    os.environ["SERVELAB_DATABASE_URL"] = f"sqlite:///{home / 'servelab.db'}"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze = _unfreeze
    gc.unfreeze()
    if _session_home in config.stash:
        shutil.rmtree(config.stash[_session_home], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture
def objects_unfreeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of tests, where a closed engine's objects are collected even if they refer to each other."""
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)


@pytest.fixture(autouse=True)
def isolated_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test has a database of its own."""
    monkeypatch.setenv("SERVELAB_DATABASE_URL", f"sqlite:///{tmp_path / 'servelab.db'}")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Where a test draws without a seed of its own, it draws what it would draw alone."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The default model, pulled and converted on first use."""
    return ensure_model("smollm2-135m", lambda *progress: None)
