"""The Kernels page in a browser: its tables are drawn on a canvas, which only a browser gives a width."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.filled import KERNELS
from tests.browser.pages import check_fits, open_page, until, visit
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser


def test_every_column_of_the_timings_is_seen_on_a_wide_page(filled: Dashboard, chromium: Browser) -> None:
    with open_page(chromium) as page:
        visit(page, f"{filled.url}/kernels?run={KERNELS}")
        timings = page.get_by_test_id("stDataFrame").first.locator(".dvn-scroller")
        expect(timings).to_be_visible()
        until(page, lambda: timings.evaluate("element => element.scrollWidth - element.clientWidth") <= 0)
        check_fits(page, (1440, "light"), (420, "dark"))
