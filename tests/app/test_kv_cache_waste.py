"""Kinds of waste on the KV cache page, for a run whose layout loses free blocks."""

from __future__ import annotations

import re

import pytest

from tests.app.kv_runs import BLOCK_SIZE, NUM_BLOCKS, end, feed, start_kv_run, traffic
from tests.app.pages import page
from tests.app.stored_runs import FakeServices


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_free_blocks_that_no_request_can_get(services: FakeServices, layout: str) -> None:
    """25 blocks to a request of 100 tokens: fewer free ones are of no use to anybody."""
    run_id, recorder = start_kv_run(services, {"cache.layout": layout})
    made = traffic(run_id)
    feed(recorder, made.steps, made.chunks)
    end(recorder)
    free = made.steps[7].num_free_blocks
    assert 0 < free < 25 < NUM_BLOCKS
    app = page("kv_cache", run=str(run_id), step="7")
    shown = " ".join(element.proto.body for element in app.get("html"))
    unusable = re.findall(r"free, but too few for a request <b>(\d+)</b>", shown)
    assert unusable == ([str(free * BLOCK_SIZE)] if layout == "contiguous" else [])
    figure = next(metric for metric in app.metric if metric.label == "Free")
    lost = f", {free} unusable" if layout == "contiguous" else ""
    assert (figure.value, figure.delta) == (str(free), f"of {NUM_BLOCKS} blocks{lost}")
