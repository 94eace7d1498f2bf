"""The KV cache page: which run and step it shows, what it says of them, and what it sends to the block map."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.components.kv_cache_map import encode, request_colour, request_name
from app.components.kv_cache_source import FOLLOW
from app.components.kv_cache_steps import StepTimes, usage
from backend.core.block_events import PoolState
from backend.metrics.block_map import BlockMap
from backend.metrics.kv_use import kv_use
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.live import LiveRun
from backend.metrics.pool_history import PoolMoment
from tests.app.kernel_runs import add_kernel_run
from tests.app.kv_runs import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_STEPS,
    STEP_S,
    Traffic,
    add_kv_run,
    end,
    feed,
    start_kv_run,
    traffic,
)
from tests.app.pages import page, press, words
from tests.app.stored_runs import FakeServices, add_run

SLIDER, TIME = "kv-slider", "kv-time"


def decode(data: bytes) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    """What `encode` wrote: the header, the lists of blocks, and the cached ones."""
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size])
    ids = np.frombuffer(data, dtype="<u4", offset=4 + size).tolist()
    lists = []
    for _, _, length in header["lists"]:
        lists.append(ids[:length])
        ids = ids[length:]
    return header, lists, ids


def drawn(app: AppTest) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    (component,) = app.get("bidi_component")
    return decode(component.proto.bytes)


def check(app: AppTest, made: Traffic, step: int) -> None:
    """The page shows this step: on the map, in its figures and on its slider."""
    header, lists, cached = drawn(app)
    state, computed = made.states[step], made.computed[step]
    assert (header["step"], header["num_blocks"], header["block_size"]) == (step, NUM_BLOCKS, BLOCK_SIZE)
    assert {request["id"]: request["tokens"] for request in header["requests"]} == computed
    held = {
        header["requests"][request]["id"]: blocks
        for (request, _, _), blocks in zip(header["lists"], lists, strict=True)
    }
    assert held == {key: groups[0] for key, groups in state.held.items()}
    assert cached == sorted(state.cached)
    referenced = {block for blocks in held.values() for block in blocks}
    references = sum(map(len, held.values()))
    unused = len(referenced) * BLOCK_SIZE - len(
        {(blocks[at // BLOCK_SIZE], at % BLOCK_SIZE) for key, blocks in held.items() for at in range(computed[key])}
    )
    figures = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert figures["KV in use"] == (f"{100 * len(referenced) / NUM_BLOCKS:.1f} %", f"{len(referenced)} blocks")
    evictable = len(set(state.cached) - referenced)
    assert figures["Evictable"] == (str(evictable), f"{len(state.cached)} cached in all")
    assert figures["Free"] == (str(NUM_BLOCKS - len(referenced) - evictable), f"of {NUM_BLOCKS} blocks")
    saved = references - len(referenced)
    assert figures["Saved by sharing"] == (f"{100 * saved / references:.1f} %", f"{saved} blocks")
    assert figures["Unused slots"] == (f"{100 * unused / (len(referenced) * BLOCK_SIZE):.1f} %", f"{unused} slots")
    assert f"Step {step} of {NUM_STEPS - 1}, ended" in words(app)


def test_an_empty_page_says_what_fills_it(services: FakeServices) -> None:
    app = page("kv_cache")
    assert "Nothing has run yet" in words(app)
    assert "Start a run" in [link.label for link in app.get("page_link")]


def test_it_begins_with_the_newest_run_that_has_a_ledger_at_its_fullest_step(services: FakeServices) -> None:
    run_id, made = add_kv_run(services)
    add_run(services)
    add_kernel_run(services)
    app = page("kv_cache")
    fullest = max(made.steps, key=lambda step: step.num_referenced_blocks).step
    check(app, made, fullest)
    assert (app.query_params["run"], app.query_params["step"]) == (str(run_id), str(fullest))
    assert len(app.selectbox[0].options) == 2, "the kernel run has no KV cache"


def test_every_way_to_another_step(services: FakeServices) -> None:
    run_id, made = add_kv_run(services)
    app = page("kv_cache", run=str(run_id), step="7")
    check(app, made, 7)
    app.slider(key=SLIDER).set_value(31).run()
    check(app, made, 31)
    press(app, "Next")
    check(app, made, 32)
    press(app, "Previous")
    press(app, "Previous")
    check(app, made, 30)
    assert app.number_input(key=TIME).value == pytest.approx(31 * STEP_S)
    app.number_input(key=TIME).set_value(10.4 * STEP_S).run()
    check(app, made, 10)
    assert app.query_params["step"] == "10"
    check(page("kv_cache", run=str(run_id), step="10"), made, 10)


def test_the_ends_of_a_run(services: FakeServices) -> None:
    run_id, made = add_kv_run(services)
    for asked, step, off in (("99999", NUM_STEPS - 1, "Next"), ("0", 0, "Previous")):
        app = page("kv_cache", run=str(run_id), step=asked)
        check(app, made, step)
        assert [button.label for button in app.button if button.disabled] == [off]
    app = page("kv_cache", run=str(run_id), step="no number")
    assert not app.exception


def test_another_run_begins_at_its_own_step(services: FakeServices) -> None:
    first, _ = add_kv_run(services)
    second, made = add_kv_run(services)
    app = page("kv_cache", run=str(first), step="3")
    app.selectbox[0].set_value(second).run()
    check(app, made, max(made.steps, key=lambda step: step.num_referenced_blocks).step)
    assert app.query_params["run"] == str(second)


def test_what_happened_is_said_and_requests_are_listed(services: FakeServices) -> None:
    run_id, made = add_kv_run(services)
    app = page("kv_cache", run=str(run_id), step="0")
    taken = len(made.states[0].held[f"{run_id}-0"][0])
    assert re.search(rf"Requests? 0\b[^.]* took {taken} blocks", words(app))
    assert "tokens of prompts" in words(app)
    table = app.dataframe[0].value.set_index("Request")
    assert list(table.index) == [key.split("-")[1] for key in made.states[0].held]
    for key, groups in made.states[0].held.items():
        row = table.loc[key.split("-")[1]]
        slots = len(groups[0]) * BLOCK_SIZE
        assert (row["Blocks"], row["Tokens"], row["Unused slots"]) == (
            len(groups[0]),
            made.computed[0][key],
            slots - made.computed[0][key],
        )
    assert f"servelab runs ledger {run_id} --first 0 --last 0 --blocks" in [code.value for code in app.code]


@pytest.mark.parametrize("asked", ["99", "x"])
def test_an_address_that_names_no_run(services: FakeServices, asked: str) -> None:
    run_id, _ = add_kv_run(services)
    app = page("kv_cache", run=asked)
    assert f"no run {asked}" in words(app)
    assert app.query_params["run"] == str(run_id)


def test_a_run_without_a_ledger_and_one_without_events_say_so(services: FakeServices) -> None:
    without, (older, _) = add_run(services), add_kv_run(services, with_events=False)
    assert f"Run #{without} has no step ledger" in words(page("kv_cache", run=str(without)))
    app = page("kv_cache", run=str(older))
    assert f"ledger of run #{older} was written before it held block events" in words(app)
    assert not app.get("bidi_component")


def test_a_run_under_way_is_followed_until_somebody_scrubs(services: FakeServices) -> None:
    """A look a second in a browser; here each is a rerun."""
    add_kv_run(services)
    run_id, recorder = start_kv_run(services)
    services.fake_queue.live_run = LiveRun(run_id)
    made = traffic(run_id)
    app = page("kv_cache")
    assert f"Run #{run_id} is" in words(app)
    assert "its blocks appear here with its first steps" in words(app)
    feed(recorder, made.steps[:16], made.chunks[:1])
    app.run()
    assert drawn(app)[0]["step"] == 15
    assert not app.slider
    assert "step" not in app.query_params
    feed(recorder, made.steps[16:32], made.chunks[1:2])
    app.run()
    assert drawn(app)[0]["step"] == 31
    app.toggle[0].set_value(False).run()
    assert not app.session_state[FOLLOW]
    assert drawn(app)[0]["step"] == 31
    app.slider(key=SLIDER).set_value(20).run()
    assert app.query_params["step"] == "20"
    feed(recorder, made.steps[32:37], made.chunks[2:3])
    app.run()
    assert drawn(app)[0]["step"] == 20
    assert app.slider(key=SLIDER).max == 36
    app.toggle[0].set_value(True).run()
    assert drawn(app)[0]["step"] == 36
    feed(recorder, made.steps[37:], made.chunks[3:])
    end(recorder)
    app.run()
    check(app, made, NUM_STEPS - 1)
    assert not app.toggle
    press(app, "Previous")
    check(app, made, NUM_STEPS - 2)


def test_a_run_is_linked_from_its_details(services: FakeServices) -> None:
    add_kv_run(services)
    assert "KV blocks" in [link.label for link in page("detail", run="1").get("page_link")]


# Parts


def test_names_and_colours_of_requests() -> None:
    names = {
        "run-3-12": "12",
        "run3-c2-t11": "c2-t11",
        "run3-7/1": "7/1",
        "12-warmup-0": "warm-up 0",
        "7": "7",
        "chatcmpl-ab3f": "chatcmpl-ab3f",
    }
    assert {key: request_name(key) for key in names} == names
    colours = [request_colour(f"1-{index}") for index in range(7)]
    assert len(set(colours)) == 7
    assert [request_colour(f"1-{index}") for index in range(7)] == colours
    assert [request_colour(f"run1-c{index}-t4") for index in range(7)] == colours, "by conversation"


def test_hundred_thousand_blocks_are_four_bytes_each() -> None:
    held = {f"1-{index}": [list(range(1 + 1000 * index, 1001 + 1000 * index))] for index in range(60)}
    blocks = BlockMap(PoolState(held, list(range(70_000, 100_001))))
    moment = PoolMoment(LedgerStep(5, ()), blocks, dict.fromkeys(held, 15_990))
    data = encode(moment, kv_use(blocks, moment.num_tokens, 16), 100_000)
    assert len(data) < 4 * 90_001 + 10_000
    header, lists, cached = decode(data)
    assert lists == [groups[0] for groups in held.values()]
    assert cached == list(range(70_000, 100_001))
    assert len(header["requests"]) == 60


def row(step: int, end_time: float, num_steps: int = 1, referenced: float = 1.0) -> dict[str, Any]:
    blocks = {"num_referenced_blocks": referenced, "num_evictable_blocks": 2.0, "num_free_blocks": 7.0 - referenced}
    return {"step": step, "end_time": end_time, "num_steps": num_steps, **blocks}


def test_times_of_steps_there_and_back() -> None:
    times = StepTimes([row(step, 0.1 * (step + 1) ** 1.5, referenced=step % 5) for step in range(50)])
    for step in range(50):
        end_time = times.end_of(step)
        assert end_time is not None
        assert end_time == pytest.approx(0.1 * (step + 1) ** 1.5)
        assert times.step_at(end_time) == step
        assert times.step_at(end_time - 1e-3) == step
    assert (times.step_at(-1.0), times.step_at(1e9), times.end_of(50)) == (0, 49, None)
    assert times.peak_step == 4


def test_times_of_thinned_steps_are_interpolated() -> None:
    times = StepTimes([row(0, 1.0, 4), row(4, 3.0, 4)])
    assert [times.end_of(step) for step in (3, 5, 7)] == [1.0, 2.0, 3.0]
    assert times.step_at(2.0) == 5
    nothing = StepTimes([])
    assert (nothing.end_of(0), nothing.step_at(0.0), nothing.peak_step) == (None, None, None)


def test_the_chart_holds_all_blocks_and_the_step() -> None:
    data, spec = usage([row(0, 1.0, 2, referenced=3.0), row(2, 2.0, 2)], 2)
    areas = data[data["kind"] == "area"]
    totals: Counter[float] = Counter()
    for record in areas.to_dict("records"):
        totals[record["x"]] += record["y"]
    assert totals == {0.0: 9.0, 2.0: 9.0, 4.0: 9.0}
    assert data[data["kind"] == "mark"]["x"].tolist() == [2.5]
    assert len(spec["layer"]) == 2
    assert usage([], 0)[0]["kind"].tolist() == ["mark"]
