"""One headless Chromium for all tests, a fresh page for each, and dashboards to look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.filled import store_runs
from tests.browser.pages import PATIENCE_MS, open_page
from tests.browser.server import Dashboard, browser_path, running_dashboard

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """A module's own, without a run."""
    with running_dashboard(tmp_path_factory.mktemp("dashboard")) as dashboard:
        yield dashboard


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """With the runs of `filled.py`, for tests that start none."""
    folder = tmp_path_factory.mktemp("filled")
    store_runs(folder)
    with running_dashboard(folder) as dashboard:
        yield dashboard


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    with open_page(chromium) as page:
        yield page
