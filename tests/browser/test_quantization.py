"""The Quantization page in a browser: the matrix and the heat maps of a stored run have a cell for each figure, and what was
scanned has an address."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from app.services import Services
from backend.experiments.quantization_config import REFERENCE
from backend.experiments.quantization_results import EMULATED, columns, layer_cells
from db.session import Database
from tests.app.quantization_runs import NUM_LAYERS, add_quantization_run, layer_costs, ranges, scan
from tests.browser.filled import QUANTIZED, RESULTS
from tests.browser.pages import asking, check_fits, settle, until, visit
from tests.browser.server import Dashboard, require_browser, running_dashboard

require_browser()
pytestmark = pytest.mark.browser

SCANNED, BY_KIND, BY_LAYER, RANGES = range(1, 5)
SIZES = ((420, "dark"), (1440, "light"))  # back to the width in which the rest is tried


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """With a run whose int8 was scanned in both ways, and its ranges measured."""
    folder = tmp_path_factory.mktemp("scanned")
    with Services(Database.open(f"sqlite:///{folder / 'servelab.db'}")) as services:
        run_ids = [
            add_quantization_run(services),
            add_quantization_run(
                services, scan("int8", {"qkv": 0.1, "down": 0.3, "all": 0.5}), experiment="sensitivity"
            ),
            add_quantization_run(services, scan("int8", layer_costs(0.01)), experiment="sensitivity", by="layer"),
            add_quantization_run(services, [*ranges(REFERENCE), *ranges("int8", 1.5)], experiment="ranges"),
        ]
    assert run_ids == [SCANNED, BY_KIND, BY_LAYER, RANGES]
    with running_dashboard(folder) as dashboard:
        yield dashboard


def query(page: Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


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
    check_fits(page, *SIZES)


def test_tabs_are_addresses_and_the_config_reaches_the_run_form(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/quantization?run={QUANTIZED}&view=Weights")
    expect(page.get_by_test_id("stVegaLiteChart")).to_have_count(2)
    with asking(page):
        page.get_by_role("tab", name="Take it away").click()
    expect(page).to_have_url(f"{filled.url}/quantization?run={QUANTIZED}&view=Take+it+away")
    check_fits(page, *SIZES)
    with asking(page):
        page.get_by_role("button", name="Open on the Run page").click()
    expect(page).to_have_url(f"{filled.url}/run")
    expect(page.get_by_role("heading", name="Run", exact=True)).to_be_visible()


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


def test_what_is_scanned_is_an_address_and_a_choice(scanned: Dashboard, page: Page) -> None:
    visit(page, f"{scanned.url}/quantization?run={BY_LAYER}")
    place = {"run": [str(SCANNED)], "view": ["Sensitivity"], "variant": ["int8"]}
    until(page, lambda: query(page) == place | {"by": ["One layer at a time"]})
    cells = page.locator('.st-key-quantization-scanned [aria-roledescription="rect mark"]')
    expect(cells).to_have_count(4 * NUM_LAYERS - 1)  # a layer that costs nothing is left blank
    check_fits(page, *SIZES)
    with asking(page):
        page.get_by_role("radio", name="Kind of layer").click()
    until(page, lambda: query(page) == place | {"by": ["Kind of layer"]})
    bars = page.locator('.st-key-quantization-scanned [aria-roledescription="bar"]')
    expect(bars).to_have_count(3)
    page.reload()
    settle(page)
    expect(bars).to_have_count(3)
    expect(page.get_by_text(f"Run #{BY_KIND}, 2,046 tokens")).to_be_visible()
    check_fits(page, *SIZES)


def test_ranges_have_a_picture_for_each_kind_of_values(scanned: Dashboard, page: Page) -> None:
    visit(page, f"{scanned.url}/quantization?run={RANGES}")
    until(page, lambda: query(page) == {"run": [str(SCANNED)], "view": ["Ranges"], "variant": ["int8"]})
    lines = page.locator('.st-key-quantization-reaches [aria-roledescription="line mark"]')
    expect(lines).to_have_count(4 * 3)
    expect(page.get_by_text("those would share 3 of the 255 codes")).to_be_visible()
    check_fits(page, *SIZES)
