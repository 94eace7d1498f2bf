"""The Quantization page in a browser: the matrix and the heat maps of a stored run have a cell for each figure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from app.services import Services
from backend.experiments.quantization_results import EMULATED, columns, layer_cells
from tests.app.quantization_runs import add_quantization_run, emulated, failed, reference, result
from tests.browser.pages import asking, open_page, visit
from tests.browser.server import Dashboard, require_browser, running_dashboard

require_browser()
pytestmark = pytest.mark.browser

RESULTS = (reference(), result("int8"), emulated("nf4"), result("awq", layers=None), failed("gptq", "it has no files"))


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """With run #1 stored before it starts."""
    folder = tmp_path_factory.mktemp("quantization")
    with Services.open(f"sqlite:///{folder / 'servelab.db'}") as services:
        add_quantization_run(services, RESULTS, status="failed", error="gptq: it has no files")
    with running_dashboard(folder) as dashboard:
        yield dashboard


def test_the_matrix_and_the_heat_maps_hold_what_is_stored(dashboard: Dashboard, page: Page) -> None:
    visit(page, f"{dashboard.url}/quantization")
    expect(page).to_have_url(f"{dashboard.url}/quantization?run=1")
    results = dashboard.repository.quantization_results(1)
    names = columns(results)
    lines = page.locator(".sl-matrix tbody tr")
    expect(lines).to_have_count(len(RESULTS))
    for row in results:
        line = page.locator(f'.sl-matrix tr[data-variant="{row["variant"]}"]')
        expect(line.locator("td")).to_have_count(1 if row["problem"] else len(names))
    dash = page.locator('.sl-matrix tr[data-variant="nf4"] td').nth(names.index("decode_32_tok_s"))
    expect(dash).to_have_text("–")
    expect(dash).to_have_attribute("title", EMULATED)
    cells = page.locator('.st-key-quantization-heat [aria-roledescription="rect mark"]')
    expect(cells).to_have_count(len(layer_cells(results)))


def test_tabs_are_addresses_and_the_config_reaches_the_run_form(dashboard: Dashboard, page: Page) -> None:
    visit(page, f"{dashboard.url}/quantization?run=1&view=Weights")
    expect(page.get_by_test_id("stVegaLiteChart")).to_have_count(2)
    with asking(page):
        page.get_by_role("tab", name="Take it away").click()
    expect(page).to_have_url(f"{dashboard.url}/quantization?run=1&view=Take+it+away")
    with asking(page):
        page.get_by_role("button", name="Open on the Run page").click()
    expect(page).to_have_url(f"{dashboard.url}/run")
    expect(page.get_by_role("heading", name="Run", exact=True)).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (420, "dark")])
def test_it_fits(dashboard: Dashboard, chromium: Browser, width: int, scheme: str) -> None:
    with open_page(chromium, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        visit(page, f"{dashboard.url}/quantization?run=1")
        overflow = "element => element.scrollWidth - element.clientWidth"
        assert page.get_by_test_id("stMain").evaluate(overflow) <= 0
