"""The Speculation page in a browser, of a run of a real engine that speculates and one that does not, against its ledger."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from app.services import Services
from backend.metrics.speculation_ledger import SPECULATION_KIND, Round, read_rounds
from db.session import Database
from tests.app.engine_runs import run_to_the_end
from tests.browser.pages import asking, check_fits, settle, visit
from tests.browser.server import Dashboard, require_browser, running_dashboard

require_browser()
pytestmark = pytest.mark.browser

_PLAIN, _NGRAM = 1, 2
_SETTINGS = (
    "model.name=dummy:tiny",
    "model.device=cpu",
    "workload.source.kind=synthetic",
    "workload.source.num_requests=3",
    "workload.source.prompt_len=80",
    "workload.output_len=200",
    "workload.sampling.ignore_eos=true",
)
_ALWAYS = ("speculative.method=ngram", "speculative.adaptive=false")
_CELL = ".st-key-speculation-rounds path[aria-roledescription='rect mark']"


@pytest.fixture(scope="module")
def speculated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("speculated")
    with Services(Database.open(f"sqlite:///{folder / 'servelab.db'}")) as services:
        assert run_to_the_end(services, _SETTINGS) == _PLAIN
        assert run_to_the_end(services, (*_SETTINGS, *_ALWAYS)) == _NGRAM
    with running_dashboard(folder) as dashboard:
        yield dashboard


def rounds_of(dashboard: Dashboard, index: int) -> list[Round]:
    chunks = dashboard.repository.chunks(_NGRAM, SPECULATION_KIND)
    name = next(
        row["request_id"]
        for row in dashboard.repository.requests(_NGRAM)
        if row["index"] == index and not row["warmup"]
    )
    return [each for data, *_ in chunks for each in read_rounds(data) if each.request_id == name]


def test_what_was_drafted_is_seen_and_pointed_at(speculated: Dashboard, page: Page) -> None:
    visit(page, f"{speculated.url}/speculation?run={_NGRAM}&request=1")
    own = rounds_of(speculated, 1)
    cells = page.locator(_CELL)
    expect(cells).to_have_count(sum(len(each.draft_token_ids) + 1 for each in own[:40]))
    number, each = next((number, each) for number, each in enumerate(own, start=1) if each.num_accepted)
    cell = page.locator(f"{_CELL}[aria-label*=': 1; round: {number};']")
    expect(cell).to_have_attribute("aria-label", re.compile(f"id: {each.draft_token_ids[0]:,}; .*accepted"))
    box = cell.bounding_box()
    assert box is not None
    # In its middle, where the token's text lies on it.
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = page.locator("#vg-tooltip-element")
    for row in ("id", "p of the target", "p to be accepted", "draft, ms", "verify, ms"):
        expect(tooltip.locator("td.key", has_text=re.compile(f"^{row}"))).to_have_count(1)
    expect(tooltip).to_contain_text(str(each.draft_token_ids[0]))
    charts = page.get_by_test_id("stVegaLiteChart")
    expect(charts).to_have_count(3)
    check_fits(page, (1440, "dark"), (420, "light"), within=charts)


def test_tabs_and_runs_are_in_the_address(speculated: Dashboard, page: Page) -> None:
    visit(page, f"{speculated.url}/speculation")
    expect(page).to_have_url(re.compile(rf"run={_NGRAM}$"))
    with asking(page):
        page.get_by_role("tab", name="Speedup").click()
    expect(page).to_have_url(re.compile(rf"with={_PLAIN}"))
    expect(page).to_have_url(re.compile("view=Speedup"))
    main = page.get_by_test_id("stMain")
    expect(main).to_contain_text("Measured: ×")
    page.reload()
    settle(page)
    expect(main).to_contain_text("Measured: ×")
    check_fits(page, (420, "dark"), (1440, "light"))
    with asking(page):
        page.get_by_role("tab", name="Proposers").click()
    expect(page.get_by_test_id("stDataFrame")).to_be_visible()
