"""The block map in a browser, of a run that shares prefixes in a pool that is too small for it, against the run's ledger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from backend.metrics.block_map import BlockMap
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from tests.browser.server import Dashboard, require_browser, running_dashboard

require_browser()
pytestmark = pytest.mark.browser

NUM_BLOCKS = 48
BLOCK_SIZE = 16
SETTINGS = {
    "model.name": "dummy:tiny",
    "model.device": "cpu",
    "cache.num_blocks": NUM_BLOCKS,
    "cache.block_size": BLOCK_SIZE,
    "scheduler.max_num_seqs": 8,
    "workload.source.kind": "shared_prefix",
    "workload.source.groups": 3,
    "workload.source.prompts_per_group": 6,
    "workload.source.prefix_len": 48,
    "workload.source.suffix_len": 11,
    "workload.output_len": 60,
}


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """With run #1 stored before it starts."""
    folder = tmp_path_factory.mktemp("kv-cache")
    options = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    subprocess.run(
        [sys.executable, "-m", "app.cli", "run", *options],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"SERVELAB_DATABASE_URL": f"sqlite:///{folder / 'servelab.db'}"},
        check=True,
        capture_output=True,
    )
    with running_dashboard(folder) as dashboard:
        yield dashboard


@pytest.fixture(scope="module")
def ledger(dashboard: Dashboard) -> LedgerReader:
    return LedgerReader(dashboard.repository.chunks(1, LEDGER_KIND))


def visit(page: Page, address: str) -> None:
    page.goto(address)
    settle(page)


def settle(page: Page) -> None:
    page.wait_for_timeout(300)  # a click takes a moment to reach the server
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    expect(page.get_by_test_id("stException")).to_have_count(0)


def block_map(ledger: LedgerReader, step: int) -> BlockMap:
    found = ledger.block_map(step)
    assert found is not None
    return found


def canvas_at(page: Page, step: int) -> Locator:
    canvas = page.locator("canvas[data-step]")
    expect(canvas).to_have_attribute("data-step", str(step))
    return canvas


def check_counts(page: Page, ledger: LedgerReader, step: int) -> None:
    """What the canvas has drawn is what the ledger says of the step, and the legend says the same."""
    blocks = block_map(ledger, step)
    ref_counts = blocks.ref_counts()
    shared = sum(count > 1 for count in ref_counts.values())
    referenced, evictable, free = blocks.counts(NUM_BLOCKS)
    expected = {"held": referenced - shared, "shared": shared, "evictable": evictable, "free": free}
    canvas = canvas_at(page, step)
    for state, count in expected.items():
        expect(canvas).to_have_attribute(f"data-{state}", str(count))
        expect(page.locator(f"[data-count={state}]")).to_have_text(str(count))


def place_of(canvas: Locator, block: int) -> dict[str, float]:
    """Where a block's cell is."""
    size, columns, gutter = (int(canvas.get_attribute(f"data-{name}") or 0) for name in ("size", "columns", "gutter"))
    row, column = divmod(block - 1, columns)
    return {"x": gutter + (column + 0.5) * size, "y": (row + 0.5) * size}


def shared_step(ledger: LedgerReader) -> int:
    """A step in which blocks are shared and others are evictable."""
    for step in ledger.steps:
        blocks = block_map(ledger, step)
        if blocks.counts(NUM_BLOCKS)[1] and max(blocks.ref_counts().values(), default=0) > 1:
            return step
    raise AssertionError("nothing was shared in this run")


def test_scrubbing_shows_what_the_ledger_says(dashboard: Dashboard, page: Page, ledger: LedgerReader) -> None:
    first = shared_step(ledger)
    visit(page, f"{dashboard.url}/kv-cache?run=1&step={first}")
    check_counts(page, ledger, first)
    page.get_by_role("slider", name="Step").focus()
    for step in (first + 1, first + 2):
        page.keyboard.press("ArrowRight")
        check_counts(page, ledger, step)
    page.get_by_role("button", name="Previous").click()
    check_counts(page, ledger, first + 1)
    expect(page).to_have_url(re.compile(rf"run=1&step={first + 1}$"))
    page.reload()
    check_counts(page, ledger, first + 1)
    page.get_by_role("slider", name="Step").press("End")
    check_counts(page, ledger, ledger.steps[-1])


def test_without_a_step_the_fullest_is_shown(dashboard: Dashboard, page: Page, ledger: LedgerReader) -> None:
    visit(page, f"{dashboard.url}/kv-cache")
    fullest = max(ledger.steps, key=lambda step: block_map(ledger, step).counts(NUM_BLOCKS)[0])
    check_counts(page, ledger, fullest)


def test_pointing_says_who_holds_a_block_and_clicking_pins_them_in_turn(
    dashboard: Dashboard, page: Page, ledger: LedgerReader
) -> None:
    step = shared_step(ledger)
    blocks = block_map(ledger, step)
    visit(page, f"{dashboard.url}/kv-cache?run=1&step={step}")
    canvas, tip = canvas_at(page, step), page.locator(".tip")
    block, count = max(blocks.ref_counts().items(), key=lambda item: item[1])
    holders = {key: groups[0].index(block) for key, groups in blocks.held.items() if block in groups[0]}
    assert len(holders) == count > 1
    canvas.hover(position=place_of(canvas, block))  # type: ignore[arg-type]
    expect(tip).to_contain_text(f"Block {block}")
    for key, place in holders.items():
        tokens = f"tokens {place * BLOCK_SIZE} to {(place + 1) * BLOCK_SIZE - 1}"
        expect(tip).to_contain_text(f"Request {key.rpartition('-')[2]}: {tokens}")
    expect(tip).to_contain_text(f"Reference count {count}, can be found in the cache")
    evictable = min(blocks.cached - blocks.ref_counts().keys())
    canvas.hover(position=place_of(canvas, evictable))  # type: ignore[arg-type]
    expect(tip).to_have_text(re.compile(rf"Block {evictable}\s+Evictable"))
    for key in (*holders, ""):
        canvas.click(position=place_of(canvas, block))  # type: ignore[arg-type]
        expect(canvas).to_have_attribute("data-pinned", key)
    canvas.click(position=place_of(canvas, block))  # type: ignore[arg-type]
    page.get_by_role("button", name="Next").click()
    expect(canvas_at(page, step + 1)).to_have_attribute("data-pinned", next(iter(holders)))
    canvas.press("Escape")
    expect(canvas).to_have_attribute("data-pinned", "")


def test_it_draws_when_something_has_changed_only(dashboard: Dashboard, page: Page, ledger: LedgerReader) -> None:
    step = shared_step(ledger)
    visit(page, f"{dashboard.url}/kv-cache?run=1&step={step}")
    canvas = canvas_at(page, step)
    draws = canvas.get_attribute("data-draws")
    page.get_by_text("Requests that hold blocks").click()
    ends = {row["step"]: row["end_time"] for row in dashboard.repository.steps(1)}
    time = page.get_by_test_id("stNumberInputField")
    time.fill(f"{(ends[step - 1] + ends[step]) / 2:.6f}")
    time.press("Enter")
    expect(time).to_have_value(f"{ends[step]:.3f}")  # the page was run again, and the step is the same
    canvas.hover(position=place_of(canvas, 1))  # type: ignore[arg-type]
    expect(page.locator(".tip")).to_contain_text("Block 1")
    assert canvas.get_attribute("data-draws") == draws
    page.set_viewport_size({"width": 900, "height": 900})
    expect(canvas).not_to_have_attribute("data-draws", draws or "")
    check_counts(page, ledger, step)


@pytest.mark.parametrize("width", [1440, 420])
def test_what_the_prefix_cache_did_is_what_the_run_has_counted(
    dashboard: Dashboard, chromium: Browser, width: int
) -> None:
    """Also that a link to a request opens it, and that the way back leads to the blocks."""
    context = chromium.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    rows = [row for row in dashboard.repository.requests(1) if not row["warmup"]]
    found = {str(row["index"]): row["num_cached_tokens"] for row in rows}
    name = max(found, key=lambda index: found[index])
    visit(page, f"{dashboard.url}/kv-cache?run=1&request={name}")
    saved = page.get_by_test_id("stMetric").filter(has_text="Saved")
    expect(saved.get_by_test_id("stMetricValue")).to_have_text(f"{sum(found.values()):,}")
    expect(page.get_by_text(f"{found[name]} of its {rows[0]['num_prompt_tokens']} prompt tokens")).to_be_visible()
    expect(page.get_by_text("First token that differs")).to_be_visible()
    expect(page.get_by_test_id("stVegaLiteChart").get_by_role("img")).to_be_visible()
    main = page.get_by_test_id("stMain")
    assert main.evaluate("element => element.scrollWidth - element.clientWidth") <= 0
    page.get_by_role("button", name="Largest miss").click()
    settle(page)
    expect(page).to_have_url(re.compile(r"request=\d+"))
    page.get_by_role("tab", name="Blocks").click()
    expect(page.locator("canvas[data-step]")).to_be_visible()
    expect(page).to_have_url(re.compile(r"run=1&step=\d+$"))
    context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (800, "light"), (400, "dark")])
def test_it_fits(dashboard: Dashboard, chromium: Browser, ledger: LedgerReader, width: int, scheme: str) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    step = shared_step(ledger)
    visit(page, f"{dashboard.url}/kv-cache?run=1&step={step}")
    check_counts(page, ledger, step)
    main = page.get_by_test_id("stMain")
    assert main.evaluate("element => element.scrollWidth - element.clientWidth") <= 0
    canvas = canvas_at(page, step).bounding_box()
    assert canvas is not None
    assert canvas["x"] + canvas["width"] <= width
    context.close()
