from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.integrity import MadeEngines
from tests.helpers import make_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def made_engines() -> Iterator[MadeEngines]:
    """Those made while the tests of this folder run; a test that damages one on purpose adds it to `broken`."""
    made = MadeEngines()
    with made.recording():
        yield made


@pytest.fixture(autouse=True)
def engines_hold_together(made_engines: MadeEngines) -> Iterator[None]:
    """After every test: no block is lost, in two places, or held by other requests than are counted."""
    yield
    made_engines.check()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()
