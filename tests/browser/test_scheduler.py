"""The Scheduler page in a browser, of a static and a continuous run of the same requests, against the runs' ledgers."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.ledger_reader import LedgerReader
from tests.browser.filled import CONTINUOUS, SLOTS, STATIC
from tests.browser.pages import check_fits, open_page, settle, until, visit
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser


def steps_of(filled: Dashboard, run_id: int) -> list[LedgerStep]:
    """Of the measured part: the warm-up is over before it."""
    reader = LedgerReader(filled.repository.chunks(run_id, LEDGER_KIND))
    steps = [reader.step(number) for number in reader.steps]
    return [step for step in steps if not any("warmup" in entry.request_id for entry in step.entries)]


def bars(page: Page, run_id: int, request: int | None = None) -> Locator:
    """The bars of a run's Gantt chart, or of one request in it: what they show stands in their labels."""
    label = "" if request is None else f'[aria-label*="request: {request};"]'
    return page.locator(f".st-key-scheduler-gantt-{run_id} path[aria-roledescription=bar]{label}")


def tokens_shown(page: Page, run_id: int) -> Counter[int]:
    """Request -> tokens in its bars."""
    shown: Counter[int] = Counter()
    for label in bars(page, run_id).evaluate_all("bars => bars.map(bar => bar.getAttribute('aria-label'))"):
        request, tokens = re.search(r"request: (\d+);", label), re.search(r"tokens: ([\d,]+)", label)
        assert request is not None
        assert tokens is not None
        shown[int(request[1])] += int(tokens[1].replace(",", ""))
    return shown


def tokens_in_ledger(steps: list[LedgerStep]) -> Counter[int]:
    ran: Counter[int] = Counter()
    for step in steps:
        for entry in step.entries:
            ran[int(entry.request_id.rpartition("-")[2])] += entry.num_scheduled_tokens
    return ran


def test_two_runs_are_stacked_with_all_that_their_ledgers_hold(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/scheduler?run={STATIC}")
    page.get_by_role("combobox", name="Beside").click()
    page.get_by_role("option", name="continuous").click()
    expect(page).to_have_url(re.compile(rf"run={STATIC}&beside={CONTINUOUS}$"))
    settle(page)
    main = page.get_by_test_id("stMain")
    for run_id, label in ((STATIC, "static"), (CONTINUOUS, "continuous")):
        expect(bars(page, run_id, 23).first).to_be_attached()
        steps = steps_of(filled, run_id)
        assert tokens_shown(page, run_id) == tokens_in_ledger(steps)
        idle = 1 - sum(len(step.entries) for step in steps) / (SLOTS * len(steps))
        expect(main).to_contain_text(f"#{run_id} {label}: {100 * idle:.1f} % of the slot-steps were idle")
        expect(main).to_contain_text(f"({len(steps)} steps of {SLOTS} slots)")
    expect(main).to_contain_text("They differ in scheduler.batching (static | continuous).")
    expect(page.get_by_test_id("stAlert")).to_have_count(0)


def test_clicking_a_bar_looks_into_its_request(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/scheduler?run={CONTINUOUS}")
    row = next(row for row in filled.repository.requests(CONTINUOUS) if row["index"] == 7 and not row["warmup"])
    bars(page, CONTINUOUS, 7).last.click()
    expect(page).to_have_url(re.compile(r"request=7$"))
    main = page.get_by_test_id("stMain")
    expect(main).to_contain_text(f"{row['num_prompt_tokens']} prompt tokens")
    expect(main).to_contain_text(f"{row['num_output_tokens']} output tokens")
    steps = steps_of(filled, CONTINUOUS)
    mine = [step for step in steps if any(entry.request_id == row["request_id"] for entry in step.entries)]
    others = [entry for step in mine for entry in step.entries if entry.request_id != row["request_id"]]
    prompts = sum(entry.num_scheduled_tokens for entry in others if entry.kind != "decode")
    shared = f"Who shared its steps ({len({entry.request_id for entry in others})} requests, {prompts:,} of their prompt tokens)"
    expect(page.get_by_text(shared)).to_be_visible()
    page.reload()
    expect(page.get_by_text(shared)).to_be_visible()
    page.get_by_role("button", name="Slowest first token").click()
    slowest = max(
        (row for row in filled.repository.requests(CONTINUOUS) if not row["warmup"]), key=lambda row: row["ttft_ms"]
    )
    expect(page).to_have_url(re.compile(rf"request={slowest['index']}$"))


def test_dragging_over_the_steps_zooms_and_the_whole_run_comes_back(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/scheduler?run={CONTINUOUS}")
    expect(bars(page, CONTINUOUS, 23).first).to_be_attached()
    everything = bars(page, CONTINUOUS).count()
    chart = page.locator(f".st-key-scheduler-tokens-{CONTINUOUS} svg.marks")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y, steps=5)
    page.wait_for_timeout(1000)  # a slow hand: what it has marked so far is not taken for all
    page.mouse.move(x + 80, y, steps=5)
    page.wait_for_timeout(1000)
    expect(page).to_have_url(f"{filled.url}/scheduler?run={CONTINUOUS}")
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=[\d.]+&to=[\d.]+$"))
    settle(page)
    until(page, lambda: 0 < bars(page, CONTINUOUS).count() < everything)  # a chart is drawn after its page
    page.get_by_role("button", name="Whole run").click()
    settle(page)
    expect(bars(page, CONTINUOUS, 23).first).to_be_attached()


def test_it_fits(filled: Dashboard, chromium: Browser) -> None:
    with open_page(chromium) as page:
        visit(page, f"{filled.url}/scheduler?run={STATIC}&beside={CONTINUOUS}&request=5")
        expect(bars(page, CONTINUOUS, 23).first).to_be_attached()
        charts = page.get_by_test_id("stVegaLiteChart")
        expect(charts).to_have_count(10)  # three a run and two for the request in each
        check_fits(page, (1440, "dark"), (420, "light"), within=charts)
