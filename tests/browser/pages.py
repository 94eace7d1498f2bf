"""Pages in a browser, and when one has got all that it asked for.

A page says that its script runs only once the server has begun, so right after a click it looks as settled as before. What
passes over its connection tells more: each rerun that it asks for, and the end of each run of the script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from playwright.sync_api import Browser, Locator, Page, Request, WebSocket, expect
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

PATIENCE_MS = 60_000  # the engine and the browser share the cores

_SETTLED = '[data-testid="stApp"][data-test-script-state="notRunning"][data-test-connection-state="CONNECTED"]'
_WHOLE_PAGE = ""
_traffic: WeakKeyDictionary[Page, _Traffic] = WeakKeyDictionary()


class _Traffic:
    """The reruns of a page that somebody caused; those that a fragment's timer asks for come and go.

    Attributes:
        num_asked: how many it has asked for.
        unanswered: ids of the fragments, or that of the whole page, whose run it waits for.
    """

    def __init__(self, page: Page) -> None:
        self.num_asked = 0
        self.unanswered: set[str] = set()
        self._begun: set[str] = set()  # of those, whose run has begun since they were asked for
        self._connection: WebSocket | None = None
        page.on("request", self._on_request)
        page.on("websocket", self._on_connection)

    def _on_request(self, request: Request) -> None:
        if (
            request.is_navigation_request() and request.frame.parent_frame is None
        ):  # it connects, and asks for all of it
            self._connection, self.unanswered, self._begun = None, {_WHOLE_PAGE}, set()

    def _on_connection(self, connection: WebSocket) -> None:
        if connection.url.endswith("/_stcore/stream"):
            self._connection = connection
            connection.on("framesent", lambda data: self._on_sent(connection, data))
            connection.on("framereceived", lambda data: self._on_received(connection, data))

    def _on_sent(self, connection: WebSocket, data: bytes | str) -> None:
        if connection is not self._connection or isinstance(data, str):
            return
        message = BackMsg.FromString(data)
        if message.WhichOneof("type") == "rerun_script" and not message.rerun_script.is_auto_rerun:
            self.num_asked += 1
            self.unanswered.add(message.rerun_script.fragment_id)
            self._begun.discard(message.rerun_script.fragment_id)

    def _on_received(self, connection: WebSocket, data: bytes | str) -> None:
        if connection is not self._connection or isinstance(data, str):
            return
        message = ForwardMsg.FromString(data)
        kind = message.WhichOneof("type")
        if kind == "new_session":
            fragments = set(message.metadata.run.fragment_ids)
            self._begun = self.unanswered & fragments if fragments else set(self.unanswered)
        elif kind == "script_finished":
            if message.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                self.unanswered -= self._begun
            self._begun = set()


@contextmanager
def open_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """A fresh page, which `settle` can tell about.

    Args:
        options: of the browser's context.
    """
    context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    _traffic[page] = _Traffic(page)
    yield page
    context.close()


def visit(page: Page, address: str) -> None:
    page.goto(address)
    settle(page)


def settle(page: Page) -> None:
    """Wait until the page is drawn as its last change asks for, and make sure that it shows no exception."""
    page.wait_for_timeout(100)  # for what is sent a moment after a click
    _wait(page, lambda traffic: not traffic.unanswered)
    page.wait_for_selector(_SETTLED)
    expect(page.get_by_test_id("stException")).to_have_count(0)


@contextmanager
def asking(page: Page) -> Iterator[None]:
    """What is done within asks for a rerun, soon or late; it has been drawn when this is left."""
    before = _traffic[page].num_asked
    yield
    _wait(page, lambda traffic: traffic.num_asked > before)
    settle(page)


def until(page: Page, condition: Callable[[], object]) -> None:
    """Return as soon as `condition` holds; fail when it never does. The page goes on meanwhile."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        page.wait_for_timeout(20)


def check_fits(page: Page, *sizes: tuple[int, str], within: Locator | None = None) -> None:
    """In each width and colour scheme nothing of the page, and nothing of `within`, reaches beyond its right edge.

    A page is laid out anew, and its charts are drawn anew, some time after its window has changed.
    """

    def width_beyond() -> float:
        main = page.get_by_test_id("stMain").evaluate("element => element.scrollWidth - element.clientWidth")
        frames = [] if within is None else [element.bounding_box() for element in within.all()]
        return max([main, *(frame["x"] + frame["width"] - page.viewport_size["width"] for frame in frames)])

    for width, scheme in sizes:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        settle(page)
        try:
            until(page, lambda: width_beyond() <= 0)
        except AssertionError:
            raise AssertionError(f"{page.url} is {width_beyond()} px wider than {width} px") from None


def _wait(page: Page, condition: Callable[[_Traffic], object]) -> None:
    until(page, lambda: condition(_traffic[page]))
