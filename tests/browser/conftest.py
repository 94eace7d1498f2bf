"""One dashboard and one headless Chromium for a module's tests, a fresh page for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with running_dashboard(tmp_path_factory.mktemp("dashboard")) as dashboard:
        yield dashboard


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    with open_page(chromium) as page:
        yield page
