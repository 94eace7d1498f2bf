"""Texts of blocks on the map, of a run with a tokenizer, and the map of a pool of 100,000 blocks, each against the database."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from backend.metrics.block_map import BlockMap
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from tests.browser import large_pool
from tests.browser.filled import BLOCK_SIZE, LARGE, PROMPTS, TEXTS
from tests.browser.pages import settle, visit
from tests.browser.server import Dashboard, require_browser
from tests.browser.test_kv_cache import block_map, canvas_at, place_of

require_browser()
pytestmark = pytest.mark.browser

_COLOURS = """(canvas, ids) => {
  const [gutter, size, columns] = ["gutter", "size", "columns"].map((name) => Number(canvas.dataset[name]));
  const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return ids.map((id) => {
    const x = gutter + ((id - 1) % columns) * size, y = Math.floor((id - 1) / columns) * size;
    const at = 4 * (y * width + x);
    return data.slice(at, at + 4).join();
  });
}"""


def ledger(filled: Dashboard, run_id: int) -> LedgerReader:
    return LedgerReader(filled.repository.chunks(run_id, LEDGER_KIND))


def shown(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "↵")


def point_at(page: Page, canvas: Locator, block: int) -> Locator:
    canvas.hover(position=place_of(canvas, block))  # type: ignore[arg-type]
    expect(page.locator(".what")).to_contain_text(f"Block {block:,}")
    return page.locator(".tip .text")


def test_pointing_shows_the_text_of_a_block_if_asked(filled: Dashboard, page: Page) -> None:
    reader = ledger(filled, TEXTS)
    step = reader.steps[-1]
    blocks = block_map(reader, step).held
    visit(page, f"{filled.url}/kv-cache?run={TEXTS}&step={step}")
    canvas = canvas_at(page, step)
    first = {index: blocks[f"run{TEXTS}-{index}"][0] for index in range(len(PROMPTS))}
    expect(point_at(page, canvas, first[0][0])).to_be_hidden()  # nobody has asked
    page.get_by_text("Show text").click()
    settle(page)
    for index, prompt in enumerate(PROMPTS):
        text = point_at(page, canvas, first[index][1])
        expect(text).to_have_text(f"“{shown(prompt[BLOCK_SIZE : 2 * BLOCK_SIZE])}”", use_inner_text=True)
    expect(point_at(page, canvas, first[1][0])).to_have_text("“<script>document”")
    assert "owned" not in page.title()
    assert page.locator(".tip img, .tip script").count() == 0
    # The block in which the prompt ends and the answer begins, as its ids decode.
    row = next(row for row in filled.repository.requests(TEXTS) if row["request_id"] == f"run{TEXTS}-1")
    place = len(PROMPTS[1]) // BLOCK_SIZE
    rest = PROMPTS[1][place * BLOCK_SIZE :]
    assert rest
    expect(point_at(page, canvas, first[1][place])).to_contain_text(f"“{shown(rest)}")
    answer = [it for it in row["token_ids"][: BLOCK_SIZE - len(rest)] if 33 <= it < 127]
    for token_id in answer:
        expect(page.locator(".tip .text")).to_contain_text(chr(token_id))
    page.get_by_text("Show text").click()
    settle(page)
    expect(point_at(page, canvas, first[0][0])).to_be_hidden()


def test_a_pool_of_100000_blocks_is_drawn_block_by_block(filled: Dashboard, page: Page) -> None:
    reader = ledger(filled, LARGE)
    visit(page, f"{filled.url}/kv-cache?run={LARGE}&step=2")
    for step in (2, 3):
        blocks = block_map(reader, step)
        ref_counts = blocks.ref_counts()
        shared = sum(count > 1 for count in ref_counts.values())
        referenced, evictable, free = blocks.counts(large_pool.NUM_BLOCKS)
        assert min(shared, evictable, free) > 1000
        canvas = canvas_at(page, step)
        expected = {"held": referenced - shared, "shared": shared, "evictable": evictable, "free": free}
        for state, count in expected.items():
            expect(canvas).to_have_attribute(f"data-{state}", str(count))
            expect(page.locator(f"[data-count={state}]")).to_have_text(f"{count:,}")
        if step == 2:
            check_pixels(page, canvas, blocks)
            page.get_by_role("slider", name="Step").press("ArrowRight")
    holders = [key for key, groups in blocks.held.items() if 77_777 in groups[0]]
    assert len(holders) == 1
    point_at(page, canvas, 77_777)
    place = blocks.held[holders[0]][0].index(77_777)
    tokens = f"tokens {place * BLOCK_SIZE:,} to {(place + 1) * BLOCK_SIZE - 1:,}"
    expect(page.locator(".what")).to_contain_text(f"Request {holders[0].rpartition('-')[2]}: {tokens}")


def check_pixels(page: Page, canvas: Locator, blocks: BlockMap) -> None:
    """Blocks of one state look alike, of two states never; a cell of each at its place in the picture."""
    ref_counts = blocks.ref_counts()
    in_use = ref_counts.keys() | blocks.cached
    states = {
        "shared": [block for block, count in ref_counts.items() if count > 1],
        "evictable": sorted(blocks.cached - ref_counts.keys()),
        "free": [block for block in range(1, large_pool.NUM_BLOCKS + 1) if block not in in_use],
    }
    of_one = next(groups[0] for groups in blocks.held.values())
    states["of one request"] = [block for block in of_one[:-1] if ref_counts[block] == 1]
    seen = {}
    for state, ids in states.items():
        colours = canvas.evaluate(_COLOURS, ids[:: max(1, len(ids) // 200)])
        assert len(set(colours)) == 1, state
        seen[state] = colours[0]
    assert len(set(seen.values())) == len(states), seen
