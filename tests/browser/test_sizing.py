"""The Sizing page in a browser: figures follow the inputs, the address follows both, and what is typed wrongly stays."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from backend.analysis.presets import MODEL_PRESETS
from tests.browser.pages import check_fits, open_page, settle, visit
from tests.browser.server import Dashboard, require_browser

require_browser()
pytestmark = pytest.mark.browser


def choose(page: Page, label: str, option: str) -> None:
    box = page.get_by_role("combobox", name=re.compile(rf"\b{label}$"))
    box.click()
    box.fill(option)
    page.get_by_role("option", name=option, exact=True).click()
    settle(page)


def figure(page: Page, name: str) -> Locator:
    return page.get_by_test_id("stMetric").filter(has_text=name).get_by_test_id("stMetricValue")


def test_a_model_is_sized_linked_pasted_and_corrected(filled: Dashboard, page: Page) -> None:
    visit(page, f"{filled.url}/sizing")
    expect(page).to_have_url(f"{filled.url}/sizing?llm=Llama-3.1-8B")
    expect(figure(page, "KV per token")).to_have_text("128 KiB")
    expect(page.get_by_test_id("stVegaLiteChart").locator("svg.marks, canvas.marks").first).to_be_visible()

    choose(page, "Model", "Llama-3.1-70B")
    expect(page).to_have_url(re.compile(r"llm=Llama-3\.1-70B"))
    expect(figure(page, "KV per token")).to_have_text("320 KiB")
    expect(page.get_by_test_id("stAlert").filter(has_text="No KV cache fits")).to_be_visible()
    field = page.get_by_label("Prompt tokens", exact=True)
    field.fill("4000")
    field.press("Enter")
    settle(page)
    page.reload()
    settle(page)
    expect(page.get_by_label("Prompt tokens", exact=True)).to_have_value("4000")
    expect(figure(page, "KV per token")).to_have_text("320 KiB")
    page.go_back()
    settle(page)
    expect(page.get_by_label("Prompt tokens", exact=True)).to_have_value("1000")

    choose(page, "Model", "a config.json, pasted")
    config = dict(MODEL_PRESETS["Gemma-3-4B"].config)
    broken = json.dumps({**config, "text_config": {**config["text_config"], "sliding_window": "wide"}})
    text = page.get_by_role("textbox", name="config.json")
    text.fill(broken)
    text.press("Control+Enter")
    settle(page)
    expect(page.get_by_test_id("stAlert").filter(has_text="sliding_window 'wide' is not an integer")).to_be_visible()
    expect(text).to_have_value(broken)
    text.fill(json.dumps(config))
    text.press("Control+Enter")
    settle(page)
    expect(figure(page, "KV per token")).to_have_text("136 KiB")

    # History's filter has a name in the address too, and neither page disturbs the other.
    page.get_by_test_id("stSidebarNavLink").filter(has_text="History").click()
    settle(page)
    page.get_by_test_id("stSidebarNavLink").filter(has_text="Sizing").click()
    settle(page)
    expect(figure(page, "KV per token")).to_have_text("136 KiB")
    expect(page).to_have_url(re.compile(r"llm=pasted&config=%7B"))
    page.reload()
    settle(page)
    expect(figure(page, "KV per token")).to_have_text("136 KiB")


def test_the_page_fits_in_every_state(filled: Dashboard, chromium: Browser) -> None:
    with open_page(chromium) as page:
        for query in ("llm=Llama-3-8B", "llm=Gemma-3-4B&card=typed", "llm=DeepSeek-V3&kv=int4", "llm=pasted&prompt=x"):
            visit(page, f"{filled.url}/sizing?{query}")
            check_fits(page, (1440, "light"), (420, "dark"))
