"""The KV cache page's view of the prefix cache: its sums are the run's, and a request's miss is that of its ledger."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from streamlit.testing.v1 import AppTest

from app.components.kv_cache_prefix_request import comparison_html, pieces
from app.components.kv_cache_prefix_source import View
from app.components.kv_cache_prefix_tree import MAX_LEAVES, tree_height, tree_rows, tree_table
from backend.analysis.prefix_cache import Nearest, PrefixCache, PromptFate
from backend.analysis.prefix_tree import folded, prefix_tree, walk
from backend.analysis.prefix_words import fate_sentences
from backend.metrics.live import LiveRun
from backend.metrics.prefix_history import PrefixHistory
from backend.metrics.stats import RunEnd
from tests.app.kv_runs import add_kv_run, start_kv_run
from tests.app.pages import page, press, words
from tests.app.prefix_runs import BLOCK_SIZE, add_prefix_run, serve, start_prefix_run, store, store_records
from tests.app.stored_runs import FakeServices
from tests.metrics.prefix_traffic import WatchedLab, random_lab, tokens_of

TAB = "Prefix cache"


def figures(app: AppTest) -> dict[str, tuple[str, str]]:
    return {metric.label: (metric.value, metric.delta) for metric in app.metric}


def tree_data(app: AppTest) -> pd.DataFrame:
    (element,) = app.get("vega_lite_chart")
    with pa.ipc.open_stream(io.BytesIO(element.proto.data.data)) as reader:
        return reader.read_pandas()


def html(app: AppTest) -> str:
    return "\n".join(element.proto.body for element in app.get("html"))


def said(lab: WatchedLab, run_id: int, name: str) -> list[str]:
    """What is to be read of a request, from its ledger."""
    fate = lab.cache().fate(f"run{run_id}-{name}")
    return fate_sentences(
        fate, BLOCK_SIZE, lambda key: key.removeprefix(f"run{run_id}-").replace("warmup-", "warm-up ")
    )


def test_sums_of_the_page_are_what_the_run_has_counted(services: FakeServices) -> None:
    run_id, lab = add_prefix_run(services)
    app = page("kv_cache", run=str(run_id), view=TAB)
    rows = [row for row in services.repository.requests(run_id) if not row["warmup"]]
    counted, total = (sum(row[name] for row in rows) for name in ("num_cached_tokens", "num_prompt_tokens"))
    assert 0 < counted < total
    shown = figures(app)
    assert shown["Hit rate"] == (f"{100 * counted / total:.1f} %", f"of {total:,} tokens")
    assert shown["Saved"] == (f"{counted:,}", "tokens")
    hits = sum(row["num_cached_tokens"] > 0 for row in rows)
    assert shown["Requests that hit"] == (str(hits), f"of {len(rows)}")
    cache = lab.cache()
    for label, fate in (("No longer there", "lost"), ("Not computed yet", "pending")):
        number = sum(cache.fate(row["request_id"]).num_tokens(fate) for row in rows)  # type: ignore[arg-type]
        assert number > 0
        assert shown[label][0] == f"{number:,}"
    data = tree_data(app)
    areas = (data["x2"] - data["x"]) * (data["y2"] - data["y"])
    assert areas.sum() == pytest.approx(total)
    assert areas[data["part"] == "from the cache"].sum() == pytest.approx(counted)
    table = app.dataframe[0].value
    assert table["Tokens saved"].sum() == counted
    assert (table["Found it"] + table["Computed"] == table["Requests"]).all()


def test_a_link_to_a_request_opens_it_and_says_why(services: FakeServices) -> None:
    run_id, lab = add_prefix_run(services)
    app = page("kv_cache", run=str(run_id), request="17")
    assert app.session_state["view"] == TAB
    assert all(sentence in words(app) for sentence in said(lab, run_id, "17"))
    assert app.selectbox(key="kv-prefix-select").value == "17"
    cache = lab.cache()
    fate = cache.fate(f"run{run_id}-17")
    assert f">{len(fate.token_ids)}</span>" in html(app), "the bar is of the whole prompt"
    app.selectbox(key="kv-prefix-select").set_value("5").run()
    assert app.query_params["request"] == "5"
    assert all(sentence in words(app) for sentence in said(lab, run_id, "5"))
    press(app, "Largest miss")
    chosen = app.query_params["request"]
    missed = {key: cache.fate(key).num_tokens("lost") + cache.fate(key).num_tokens("pending") for key in cache.paths}
    assert missed[f"run{run_id}-{chosen}"] == max(missed.values())
    app = page("kv_cache", run=str(run_id), request="999")
    assert "There is no request 999" in words(app)
    assert "request" not in app.query_params


def test_the_first_view_stays_the_blocks(services: FakeServices) -> None:
    run_id, _ = add_prefix_run(services)
    app = page("kv_cache", run=str(run_id))
    assert "Hit rate" not in figures(app)
    assert "Why did this request miss?" not in words(app)


def test_without_a_cache_without_events_and_without_its_prompts_it_says_so(services: FakeServices) -> None:
    off, recorder = start_kv_run(services, {"cache.enable_prefix_caching": False})
    recorder.close()
    assert f"Prefix caching was off in run #{off}" in words(page("kv_cache", run=str(off), view=TAB))
    changed, _ = add_prefix_run(services, digest="0" * 64)
    app = page("kv_cache", run=str(changed), view=TAB)
    assert "cannot be told: the prompts drawn from the run's workload today are not those that it sent" in words(app)
    app.run()
    assert "are not those that it sent" in words(app)
    assert not app.metric
    without, _ = add_kv_run(services, with_events=False)
    app = page("kv_cache", run=str(without), view=TAB)
    assert f"Run #{without} has no step ledger with block events" in words(app)


def test_a_run_under_way_grows(services: FakeServices) -> None:
    run_id, recorder = start_prefix_run(services)
    services.fake_queue.live_run = LiveRun(run_id)
    app = page("kv_cache", run=str(run_id), view=TAB)
    assert "what it shares appears here with its first steps" in words(app)
    lab = serve(run_id)
    keys = list(lab.asked)
    store(recorder, lab, keys[:5])
    app.run()
    counted = sum(lab.asked[key].num_cached_tokens or 0 for key in keys if "warmup" not in key)
    assert figures(app)["Saved"] == (f"{counted:,}", "tokens"), "prompts are known before requests have ended"
    store_records(recorder, lab, keys[5:])
    recorder.on_run_end(RunEnd("finished", 100.0, None, None))
    recorder.close()
    app.run()
    assert figures(app)["Saved"] == (f"{counted:,}", "tokens")
    app.selectbox(key="kv-prefix-select").set_value("3").run()
    assert all(sentence in words(app) for sentence in said(lab, run_id, "3"))


# Parts


def test_of_the_samples_of_a_prompt_the_first_counts() -> None:
    lab = WatchedLab(block_size=4, num_blocks=60, watched=False)
    prompt = list(range(100, 122))
    first = lab.add("run1-0", prompt)
    lab.run()
    samples = lab.add_samples("run1-1", prompt, 3, [4, 5, 6])
    lab.run()
    history = PrefixHistory(4)
    assert history.extend(lab.reader())
    known = {request.request_id: tokens_of(request) for request in (first, *samples)}
    view = View(PrefixCache(history, known), None, 1)
    assert list(view.by_name) == ["0", "1/0", "1/1", "1/2"]
    assert view.measured == ["run1-0", "run1-1/0"]
    assert view.sums["cached"] == samples[0].num_cached_tokens == 20
    assert "another sample of a prompt" in " ".join(fate_sentences(view.cache.fate("run1-1/2"), 4))


class Letters:
    """A tokenizer of letters."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join("\ufffd" if it > 900 else chr(it) for it in token_ids)


def test_tokens_are_text_where_there_is_any() -> None:
    letters: Any = Letters()
    assert pieces([72, 10, 999, 60], letters) == ["H", "↵", "999", "<"]
    assert pieces([72, 10], None) == ["72", "10"]


def test_two_prompts_beside_each_other_are_escaped_and_marked() -> None:
    ours, theirs = (np.array([ord(it) for it in text], np.uint32) for text in ("common start<b>", "common start&c"))
    fate = PromptFate(None, ours, (), "differs", None, ())  # type: ignore[arg-type]
    text = comparison_html(fate, Nearest("run1-4", 12, 8, theirs, 14), "7", "4", Letters())  # type: ignore[arg-type]
    assert "First token that differs: 12 (id 60 and id 38)" in text
    assert ">&lt;</span>" in text
    assert ">&amp;</span>" in text
    assert "Request 7" in text
    assert "Request 4, the nearest in the cache" in text
    assert "ends here" not in text
    short = comparison_html(fate, Nearest("run1-4", 12, 8, theirs[:12], 12), "7", "4", None)
    assert "ends here" in short
    assert "(id 60 and no token)" in short


def test_rectangles_are_the_tree_and_do_not_overlap() -> None:
    cache = random_lab(1).cache()
    roots = prefix_tree(cache, cache.history.admissions)
    drawn = folded(roots, MAX_LEAVES)
    data = tree_rows(drawn, lambda node: node.first)
    assert tree_height(drawn) <= 520
    sums: dict[str, float] = {}
    for row in data.to_dict("records"):
        sums[row["part"]] = sums.get(row["part"], 0.0) + (row["x2"] - row["x"]) * (row["y2"] - row["y"])
    expected = {"from the cache": "cached", "not seen before": "new", "no longer there": "lost"}
    for name, fate in expected.items():
        total = sum(node.tokens.get(fate, 0) for node in walk(roots))  # type: ignore[arg-type]
        assert sums[name] == pytest.approx(total)
    boxes = data[["x", "x2", "y", "y2"]].to_numpy()
    for place, (x, x2, y, y2) in enumerate(boxes):
        rest = boxes[place + 1 :]
        across = np.minimum(rest[:, 1], x2) - np.maximum(rest[:, 0], x)
        down = np.minimum(rest[:, 3], y2) - np.maximum(rest[:, 2], y)
        assert not ((across > 1e-6) & (down > 1e-6)).any()
    table, number = tree_table(roots, lambda node: node.first)
    assert len(table) == number == sum(node.kind == "blocks" and node.num_requests > 1 for node in walk(roots))
    assert table["Tokens saved"].is_monotonic_decreasing
