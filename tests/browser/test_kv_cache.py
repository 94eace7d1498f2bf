"""The block map in a browser, of a run that shares prefixes in a pool that is too small for it, against the run's ledger."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from backend.metrics.block_map import BlockMap
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from tests.browser.filled import BLOCK_SIZE, NUM_BLOCKS, SHARED
from tests.browser.pages import check_fits, settle, visit
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def ledger(filled: Dashboard) -> LedgerReader:
    return LedgerReader(filled.repository.chunks(SHARED, LEDGER_KIND))


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


def test_scrubbing_shows_what_the_ledger_says(filled: Dashboard, page: Page, ledger: LedgerReader) -> None:
    first = shared_step(ledger)
    visit(page, f"{filled.url}/kv-cache?run={SHARED}&step={first}")
    check_counts(page, ledger, first)
    page.get_by_role("slider", name="Step").focus()
    for step in (first + 1, first + 2):
        page.keyboard.press("ArrowRight")
        check_counts(page, ledger, step)
    page.get_by_role("button", name="Previous").click()
    check_counts(page, ledger, first + 1)
    expect(page).to_have_url(re.compile(rf"run={SHARED}&step={first + 1}$"))
    page.reload()
    check_counts(page, ledger, first + 1)
    page.get_by_role("slider", name="Step").press("End")
    check_counts(page, ledger, ledger.steps[-1])


def test_without_a_step_the_fullest_is_shown(filled: Dashboard, page: Page, ledger: LedgerReader) -> None:
    visit(page, f"{filled.url}/kv-cache")
    fullest = max(ledger.steps, key=lambda step: block_map(ledger, step).counts(NUM_BLOCKS)[0])
    check_counts(page, ledger, fullest)


def test_pointing_says_who_holds_a_block_and_clicking_pins_them_in_turn(
    filled: Dashboard, page: Page, ledger: LedgerReader
) -> None:
    step = shared_step(ledger)
    blocks = block_map(ledger, step)
    visit(page, f"{filled.url}/kv-cache?run={SHARED}&step={step}")
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


def test_it_draws_when_something_has_changed_only_and_fits(filled: Dashboard, page: Page, ledger: LedgerReader) -> None:
    step = shared_step(ledger)
    visit(page, f"{filled.url}/kv-cache?run={SHARED}&step={step}")
    canvas = canvas_at(page, step)
    draws = canvas.get_attribute("data-draws")
    page.get_by_text("Requests that hold blocks").click()
    ends = {row["step"]: row["end_time"] for row in filled.repository.steps(SHARED)}
    time = page.get_by_test_id("stNumberInputField")
    time.fill(f"{(ends[step - 1] + ends[step]) / 2:.6f}")
    time.press("Enter")
    expect(time).to_have_value(f"{ends[step]:.3f}")  # the page was run again, and the step is the same
    canvas.hover(position=place_of(canvas, 1))  # type: ignore[arg-type]
    expect(page.locator(".tip")).to_contain_text("Block 1")
    assert canvas.get_attribute("data-draws") == draws
    page.set_viewport_size({"width": 900, "height": 900})
    expect(canvas).not_to_have_attribute("data-draws", draws or "")
    for width, scheme in ((1440, "dark"), (800, "light"), (400, "dark")):
        check_fits(page, (width, scheme), within=canvas)
        check_counts(page, ledger, step)


def test_what_the_prefix_cache_did_is_what_the_run_has_counted(filled: Dashboard, page: Page) -> None:
    """Also that a link to a request opens it, and that the way back leads to the blocks."""
    rows = [row for row in filled.repository.requests(SHARED) if not row["warmup"]]
    found = {str(row["index"]): row["num_cached_tokens"] for row in rows}
    name = max(found, key=lambda index: found[index])
    visit(page, f"{filled.url}/kv-cache?run={SHARED}&request={name}")
    saved = page.get_by_test_id("stMetric").filter(has_text="Saved")
    expect(saved.get_by_test_id("stMetricValue")).to_have_text(f"{sum(found.values()):,}")
    expect(page.get_by_text(f"{found[name]} of its {rows[0]['num_prompt_tokens']} prompt tokens")).to_be_visible()
    expect(page.get_by_text("First token that differs")).to_be_visible()
    expect(page.get_by_test_id("stVegaLiteChart").get_by_role("img")).to_be_visible()
    check_fits(page, (1440, "light"), (420, "light"))
    page.get_by_role("button", name="Largest miss").click()
    settle(page)
    expect(page).to_have_url(re.compile(r"request=\d+"))
    page.get_by_role("tab", name="Blocks").click()
    expect(page.locator("canvas[data-step]")).to_be_visible()
    expect(page).to_have_url(re.compile(rf"run={SHARED}&step=\d+$"))
