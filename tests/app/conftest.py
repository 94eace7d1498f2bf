"""Services without an engine for the tests of the dashboard, and the command line in this process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from streamlit.components.v2 import manifest_scanner

from app import resources
from app.cli import main
from db.session import Database
from tests.app.command_line import Cli
from tests.app.stored_runs import NASTY, FakeQueue, FakeServices, add_run


@pytest.fixture(scope="session", autouse=True)
def components_looked_for_once() -> Iterator[None]:
    """Each page that a test opens would ask all installed packages anew for components: most of the time that it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture
def services() -> Iterator[FakeServices]:
    """An empty database behind the pages."""
    services = FakeServices(Database.open())
    services.fake_queue = FakeQueue()
    resources.install(services)
    yield services
    resources.install(None)
    services.close()


@pytest.fixture
def stored(services: FakeServices) -> FakeServices:
    """Runs #1 and #2 finished, #3 failed, #4 cancelled, #5 finished with a hostile label."""
    add_run(services, label="first")
    add_run(services, {"cache.block_size": 32}, label="larger blocks", step_s=0.08)
    add_run(services, {"model.name": "nowhere"}, status="failed", error="there is no model 'nowhere'")
    add_run(services, status="cancelled")
    add_run(services, label=NASTY)
    return services


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run one command line in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
