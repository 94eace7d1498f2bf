"""The dashboard in a browser, from the first run on the default model to its export. Tests build on each other's runs."""

from __future__ import annotations

import csv
import io
import json
import re
import time

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.pages import asking, check_fits, open_page, settle, visit
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser

OUTPUT_TOKENS = 60  # the run goes on while its page is drawn twice, on a machine where that takes long
RUN_TIMEOUT_MS = 180_000  # on a fresh machine the first run fetches its model
ROW_HEIGHT = 35


def enter(page: Page, label: str, value: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    field.press("Enter")
    settle(page)


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def wait_for_status(dashboard: Dashboard, run_id: int, *statuses: str) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_MS / 1000
    while time.monotonic() < deadline:
        run = dashboard.repository.get(run_id)
        if run is not None and run.status in statuses:
            return
        time.sleep(0.2)
    pytest.fail(f"run #{run_id} is {run and run.status}, not {' or '.join(statuses)}")


def tick(page: Page, *rows: int) -> None:
    """Tick rows of the table, which is a canvas: its cells are places, not elements."""
    for row in rows:
        box = page.get_by_test_id("stDataFrame").bounding_box()
        assert box is not None
        with asking(page):
            page.mouse.click(box["x"] + 16, box["y"] + ROW_HEIGHT * (row + 1) + ROW_HEIGHT // 2)


def test_first_run_is_watched_reloaded_and_finished(dashboard: Dashboard, page: Page, chromium: Browser) -> None:
    """Whatever its viewers do, it is one run that goes on (streamlit/streamlit#14524): reload, another page, another size."""
    visit(page, dashboard.url)
    expect(page).to_have_url(f"{dashboard.url}/run")
    expect(page.get_by_text("Nothing has run yet")).to_be_visible()
    enter(page, "Output tokens", str(OUTPUT_TOKENS))
    button(page, "Start").click()
    progress = page.get_by_test_id("stProgress")
    expect(progress).to_contain_text(re.compile(r"running \d+ of 16"), timeout=RUN_TIMEOUT_MS)
    tokens = page.get_by_test_id("stMetric").first.get_by_text("tok so far")
    chart = page.get_by_test_id("stVegaLiteChart").first.locator("svg.marks, canvas.marks").first
    chart.evaluate("node => { node.dataset.seen = 'yes' }")
    before = tokens.inner_text()
    expect(tokens).not_to_have_text(before)
    expect(chart).to_have_attribute("data-seen", "yes")  # drawn on, not drawn anew: no flicker
    page.reload()
    expect(progress).to_contain_text(re.compile(r"running \d+ of 16"))
    expect(page.get_by_role("heading", name="Run #1")).to_be_visible()
    visit(page, f"{dashboard.url}/history")
    page.set_viewport_size({"width": 800, "height": 700})
    visit(page, f"{dashboard.url}/run")
    expect(page.get_by_role("heading", name="Run #1")).to_be_visible()
    with open_page(chromium) as other:
        visit(other, f"{dashboard.url}/run")
        expect(other.get_by_role("heading", name="Run #1")).to_be_visible()
    expect(page.get_by_role("link", name="Details of #1")).to_be_visible(timeout=RUN_TIMEOUT_MS)
    settle(page)
    run = dashboard.repository.get(1)
    assert run is not None
    assert (run.status, run.workload["output_len"]) == ("finished", OUTPUT_TOKENS)
    assert [item.run_id for item in dashboard.repository.list()] == [1]
    assert run.summary is not None
    assert run.summary["num_failed"] == 0
    assert len([row for row in dashboard.repository.requests(1) if not row["warmup"]]) == 16
    expect(page.get_by_test_id("stMetricValue").nth(3)).to_have_text("16")


def test_two_quick_presses_start_one_run_and_cancel_ends_it(dashboard: Dashboard, page: Page) -> None:
    visit(page, f"{dashboard.url}/run")
    enter(page, "Output tokens", "2000")
    button(page, "Start").dblclick()
    wait_for_status(dashboard, 2, "running")
    page.wait_for_timeout(1500)
    assert [run.run_id for run in dashboard.repository.list()] == [2, 1]
    button(page, "Cancel").click()
    wait_for_status(dashboard, 2, "cancelled")
    expect(page.get_by_test_id("stMain").get_by_text("cancelled")).to_be_visible()
    expect(button(page, "Start")).to_be_visible()


def test_a_wrong_setting_is_named_and_the_form_keeps_its_contents(dashboard: Dashboard, page: Page) -> None:
    visit(page, f"{dashboard.url}/run")
    page.get_by_text("Advanced").click()
    more = page.get_by_role("textbox", name="More settings")
    more.fill("cache.block_size = 7")
    more.press("Control+Enter")
    settle(page)
    button(page, "Start").click()
    expect(page.get_by_test_id("stAlert").filter(has_text="cache.block_size = 7")).to_be_visible()
    expect(page.get_by_role("textbox", name="More settings")).to_have_value("cache.block_size = 7")
    assert len(dashboard.repository.list()) == 2


def test_rerun_makes_a_second_finished_run(dashboard: Dashboard, page: Page) -> None:
    visit(page, f"{dashboard.url}/detail?run=1")
    button(page, "Re-run").click()
    expect(page).to_have_url(f"{dashboard.url}/run")
    wait_for_status(dashboard, 3, "finished")
    expect(page.get_by_role("link", name="Compare with #1")).to_be_visible()
    first, second = (dashboard.repository.get(run_id) for run_id in (1, 3))
    assert first is not None
    assert second is not None
    assert (first.config, first.workload) == (second.config, second.workload)
    texts = [[row["token_ids"] for row in dashboard.repository.requests(run.run_id)] for run in (first, second)]
    assert texts[0] == texts[1]


def test_history_compares_and_exports_what_is_ticked(dashboard: Dashboard, page: Page) -> None:
    visit(page, f"{dashboard.url}/history?status=finished")
    tick(page, 0, 1)
    button(page, "Export").click()
    for file_format in ("JSON", "CSV"):
        page.get_by_text(file_format, exact=True).click()
        settle(page)
        with page.expect_download() as download:
            button(page, "Download").click()
        data = download.value.path().read_bytes()
        rows = json.loads(data) if file_format == "JSON" else list(csv.DictReader(io.StringIO(data.decode())))
        assert {int(row["run_id"]) for row in rows} == {1, 3}
        assert len(rows) == 34  # 16 requests and a warm-up each
    page.keyboard.press("Escape")
    button(page, "Compare").click()
    expect(page).to_have_url(re.compile(r"/compare\?runs=1(,|%2C)3"))
    expect(page.get_by_text("Settings that differ")).to_be_visible()
    expect(page.get_by_test_id("stVegaLiteChart")).to_have_count(8)
    settle(page)


ADDRESSES = [
    "run",
    "history",
    "detail?run=1",
    "detail?run=1&view=Over+time",
    "detail?run=1&view=All+figures",
    "detail?run=1&view=Requests",
    "detail?run=1&view=Setup",
    "detail?run=99",
    "compare?runs=1,3",
    "kv-cache",
    "kv-cache?run=1",
    "sizing",
    "kernels",
    "kernels?view=Attention+over+length",
    "kernels?view=CUDA+graphs",
    "quantization",
    "compare?runs=1,2,99",
]


def test_every_page_fits_and_shows_no_exception(dashboard: Dashboard, chromium: Browser) -> None:
    with open_page(chromium) as page:
        for address in ADDRESSES:
            visit(page, f"{dashboard.url}/{address}")
            check_fits(page, (1440, "light"), (800, "dark"))
