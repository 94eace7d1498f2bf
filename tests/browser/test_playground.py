"""The Playground in a browser: an answer goes on without its viewers, and every one of them sees the same."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Browser, Locator, Page, WebSocketRoute, expect

from tests.browser.pages import open_page, until
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser

LOAD_TIMEOUT_MS = 180_000  # on a fresh machine the first load fetches the model
QUESTION = "Write the numbers from 1 to 1000, one a line."  # whose answer does not end before the viewers have seen it
_MAIN = '[data-testid="stAppScrollToBottomContainer"]'  # of a page with a chat input


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def answer(page: Page) -> Locator:
    """The text of the last answer."""
    return page.get_by_test_id("stChatMessage").last.locator(".sl-chat")


def test_an_answer_outlives_its_page_and_its_connection(dashboard: Dashboard, page: Page, chromium: Browser) -> None:
    connections: list[WebSocketRoute] = []

    def connect(connection: WebSocketRoute) -> None:
        connection.connect_to_server()
        connections.append(connection)

    page.route_web_socket(re.compile("/_stcore/stream"), connect)
    page.goto(f"{dashboard.url}/playground")
    button(page, "Load smollm2-135m").click()
    expect(button(page, "Why is the sky blue?")).to_be_visible(timeout=LOAD_TIMEOUT_MS)
    expect(page).to_have_url(re.compile(r"/playground\?chat=[\w-]+$"))
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("Max tokens", exact=True).fill("4000")
    box = page.get_by_role("textbox", name="Ask something")
    box.fill(QUESTION)
    box.press("Enter")
    expect(answer(page)).to_contain_text("3")

    before = answer(page).inner_text()
    connections[-1].close(code=3000, reason="lost")
    until(page, lambda: len(connections) == 2)
    expect(answer(page)).not_to_have_text(before)
    page.reload()
    expect(answer(page)).to_contain_text(before.strip())
    with open_page(chromium) as other:
        other.goto(page.url)
        expect(answer(other)).to_contain_text(before.strip())
        button(other, "Stop").click()
        for viewer in (page, other):
            expect(button(viewer, "Regenerate")).to_be_visible()
            expect(viewer.get_by_text("stopped")).to_be_visible()
            expect(viewer.get_by_test_id("stException")).to_have_count(0)
        assert answer(page).inner_text() == answer(other).inner_text()

    button(page, "Export").click()
    with page.expect_download() as download:
        button(page, "Download JSON").click()
    (turn,) = json.loads(download.value.path().read_text(encoding="utf-8"))["turns"]
    assert turn["answer"]["status"] == "stopped"
    assert turn["answer"]["text"].startswith(before.strip())
    page.keyboard.press("Escape")
    page.get_by_text("Show tokens").click()
    tokens = answer(page).locator("span")
    expect(tokens).to_have_count(turn["answer"]["output_tokens"])
    expect(tokens.first).to_have_attribute("title", f"token {turn['answer']['token_ids'][0]}")


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (420, "dark")])
def test_it_fits(dashboard: Dashboard, chromium: Browser, width: int, scheme: str) -> None:
    with open_page(chromium, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        page.goto(f"{dashboard.url}/playground")
        box = page.get_by_role("textbox", name="Ask something")
        box.fill("unbroken" * 60)
        box.press("Enter")
        expect(page.get_by_text(re.compile("unbroken"))).to_be_visible()
        button(page, "Stop").click()
        expect(button(page, "Regenerate")).to_be_visible()
        expect(page.get_by_test_id("stException")).to_have_count(0)
        assert page.locator(_MAIN).evaluate("element => element.scrollWidth - element.clientWidth") <= 0
