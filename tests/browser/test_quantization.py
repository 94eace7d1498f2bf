"""The Quantization page in a browser: the matrix and the heat maps of a stored run have a cell for each figure."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from backend.experiments.quantization_results import EMULATED, columns, layer_cells
from tests.browser.filled import QUANTIZED, RESULTS
from tests.browser.pages import asking, check_fits, open_page, visit
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser


def test_the_matrix_and_the_heat_maps_hold_what_is_stored(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/quantization")
    expect(page).to_have_url(f"{filled.url}/quantization?run={QUANTIZED}")
    results = filled.repository.quantization_results(QUANTIZED)
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


def test_tabs_are_addresses_and_the_config_reaches_the_run_form(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/quantization?run={QUANTIZED}&view=Weights")
    expect(page.get_by_test_id("stVegaLiteChart")).to_have_count(2)
    with asking(page):
        page.get_by_role("tab", name="Take it away").click()
    expect(page).to_have_url(f"{filled.url}/quantization?run={QUANTIZED}&view=Take+it+away")
    with asking(page):
        page.get_by_role("button", name="Open on the Run page").click()
    expect(page).to_have_url(f"{filled.url}/run")
    expect(page.get_by_role("heading", name="Run", exact=True)).to_be_visible()


@pytest.mark.parametrize("view", ["", "&view=Take+it+away"])
def test_it_fits(filled: Dashboard, chromium: Browser, view: str) -> None:
    with open_page(chromium) as page:
        visit(page, f"{filled.url}/quantization?run={QUANTIZED}{view}")
        check_fits(page, (1440, "light"), (420, "dark"))


def test_a_name_that_cannot_be_had_is_refused_beside_the_button(filled: Dashboard, page: Page) -> None:
    """And starts nothing: what it starts is seen without a browser."""
    visit(page, f"{filled.url}/quantization?run={QUANTIZED}&view=Take+it+away")
    name = page.get_by_role("textbox", name="Name")
    expect(name).not_to_have_value("")
    with asking(page):
        name.fill("a b")
        name.press("Enter")
    with asking(page):
        page.get_by_role("button", name="Save as a model").click()
    expect(page.get_by_test_id("stAlert").filter(has_text="cannot name a model")).to_be_visible()
