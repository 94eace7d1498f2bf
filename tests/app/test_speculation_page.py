"""The Speculation page: which run, request and rounds it shows, and that what it draws and says is what the ledger holds."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from sqlalchemy import delete, update
from streamlit.testing.v1 import AppTest
from tokenizers import Tokenizer

from app.components import speculation_setup
from app.components.speculation_request import MAX_ROUNDS
from app.components.widgets import PREFIX
from app.state import default_values, read_form
from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.metrics.live import LiveRun
from backend.metrics.speculation_ledger import SPECULATION_KIND, Round
from backend.workload.spec import Workload
from db.models import ChunkRow
from tests.app.pages import page, press, words
from tests.app.speculation_runs import (
    DRAFT_MS,
    LENGTHS,
    NGRAM,
    OTHER_MS,
    PLAIN,
    PLAIN_MS,
    PLAIN_OTHER_MS,
    VERIFY_MS,
    K,
    add_plain_run,
    add_speculation_run,
    end,
    feed,
    make_run,
    request_id,
    start_speculation_run,
)
from tests.app.stored_runs import FakeServices
from tests.helpers import make_tiny_llama

Rows = list[dict[str, Any]]


def charts(app: AppTest, column: str) -> Rows:
    """The rows of the chart whose data have such a column."""
    for element in app.get("vega_lite_chart"):
        with pa.ipc.open_stream(io.BytesIO(element.proto.data.data)) as reader:
            rows = reader.read_all().to_pylist()
        if rows and column in rows[0]:
            return rows
    raise AssertionError(f"no chart has {column}")


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def delivered(rounds: Sequence[Round]) -> int:
    return sum(min(each.num_accepted, each.num_emitted) for each in rounds)


def drafted(rounds: Sequence[Round]) -> int:
    return sum(len(each.draft_token_ids) for each in rounds)


def rounds_of(rounds: Sequence[Round], index: int) -> list[Round]:
    return [each for each in rounds if each.request_id == request_id(index)]


def expected_cells(rounds: Sequence[Round], first: int) -> list[tuple[Any, ...]]:
    """(round, column, kind, token id, output position, p of draft, target and acceptance)"""
    found = []
    for number, each in enumerate(rounds, start=first):
        for index, token_id in enumerate(each.draft_token_ids):
            if index < each.num_accepted:
                kind = "accepted" if index < each.num_emitted else "behind the end"
            else:
                kind = "rejected" if index == each.num_accepted else "not tested"
            probs = (each.draft_probs[index], each.target_probs[index], each.accept_probs[index])
            place = each.position + index
            found.append((number, str(index + 1), kind, token_id, place, *(f"{prob:.3g}" for prob in probs)))
        kind = "recovered" if each.num_accepted < len(each.draft_token_ids) else "bonus"
        kind = kind if each.num_accepted < each.num_emitted else "behind the end"
        place = each.position + each.num_accepted
        found.append((number, "then", kind, each.token_id, place, "–", "–", "–"))
    return found


def drawn_cells(app: AppTest) -> list[tuple[Any, ...]]:
    names = ("round", "column", "kind", "token_id", "place", "draft_prob", "target_prob", "accept_prob")
    return [tuple(row[name] for name in names) for row in charts(app, "token_id")]


def test_an_empty_page_says_what_fills_it(services: FakeServices) -> None:
    app = page("speculation")
    assert "No workload has run yet" in words(app)
    assert "Start a run" in [link.label for link in app.get("page_link")]


def test_a_run_without_speculation_says_how_to_turn_it_on(services: FakeServices) -> None:
    run_id, _ = add_plain_run(services)
    app = page("speculation", run=str(run_id))
    assert f"Run #{run_id} decoded without speculation" in words(app)
    assert "--set speculative.method=ngram" in words(app)


@pytest.mark.parametrize(("head_comes", "method"), [(True, "eagle"), (False, "ngram")])
def test_a_run_with_speculation_is_set_up_on_the_run_page(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch, head_comes: bool, method: str
) -> None:
    def check(config: EngineConfig) -> None:
        assert (config.model.name, config.speculative.method) == ("dummy:tiny", "eagle")
        if not head_comes:
            raise ConfigError("no eagle head comes for dummy:tiny")

    monkeypatch.setattr(speculation_setup, "check_engine", check)
    run_id, _ = add_plain_run(services, PLAIN | {"cache.block_size": 32}, label="slow")
    app = page("speculation", run=str(run_id))
    press(app, "Set up the run with speculation")
    assert app.title[0].value == "Run"
    values = {key: app.session_state[f"{PREFIX}{key}"] for key in default_values()}
    config = EngineConfig().with_overrides(PLAIN | {"cache.block_size": 32, "speculative.method": method})
    assert read_form(values) == (config, Workload())
    assert values["label"] == "with speculation"


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_run_that_never_drafted_is_set_up_to_draft_in_every_step(services: FakeServices, adaptive: bool) -> None:
    """Where it did not because it would not have paid."""
    settings = NGRAM | {"speculative.adaptive": adaptive}
    run_id, _ = add_speculation_run(services, settings, speculates=False)
    app = page("speculation", run=str(run_id))
    assert f"Run #{run_id} has no round" in words(app)
    name = "Set up the run with drafts in every step"
    assert (name in [button.label for button in app.button]) == adaptive
    if adaptive:
        press(app, name)
        values = {key: app.session_state[f"{PREFIX}{key}"] for key in default_values()}
        config = EngineConfig().with_overrides(NGRAM | {"speculative.adaptive": False})
        assert read_form(values) == (config, Workload())


def test_what_a_run_without_drafts_differs_by_is_no_speedup(services: FakeServices) -> None:
    plain_id, _ = add_plain_run(services)
    run_id, _ = add_speculation_run(services, speculates=False)
    drafted_id, _ = add_speculation_run(services, NGRAM | {"speculative.num_speculative_tokens": 2})
    app = page("speculation", run=str(run_id), view="Proposers")
    rows = {row["Run"]: row for row in app.dataframe[0].value.to_dict("records")}
    speeds = {int(title.split("#")[1].split()[0]): row["Speedup"] for title, row in rows.items()}
    assert speeds[plain_id] == "×1.00"
    assert str(speeds[drafted_id]).startswith("×")
    assert pd.isna(speeds[run_id])
    assert [row["Proposer"].endswith(": nothing drafted") for row in rows.values()].count(True) == 1


@pytest.mark.parametrize("view", ["Rounds", "Speedup", "Proposers"])
def test_a_run_that_was_killed_before_any_request_ended_shows_its_rounds(services: FakeServices, view: str) -> None:
    add_plain_run(services)
    made = make_run()
    run_id, recorder = start_speculation_run(services)
    feed(recorder, made, requests=False)
    services.repository.record(run_id, {"status": "interrupted"}, {})
    app = page("speculation", run=str(run_id), view=view)
    assert not app.exception
    if view == "Rounds":
        assert made.warmup
        assert metrics(app)["Rounds"] == str(len(made.rounds))
        assert "of the output" not in " ".join(str(metric.delta) for metric in app.metric)


def test_it_begins_with_the_newest_run_that_speculated(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services, label="with")
    add_plain_run(services)
    app = page("speculation")
    assert app.query_params["run"] == str(run_id)
    rounds = made.rounds
    length, rate = 1 + delivered(rounds) / len(rounds), delivered(rounds) / drafted(rounds)
    shown = metrics(app)
    assert shown["Acceptance length"] == f"{length:.2f} tok"
    assert shown["Draft acceptance"] == f"{100 * rate:.1f} %"
    assert shown["Rounds"] == str(len(rounds))
    assert (shown["Draft"], shown["Verify"]) == ("1.50 ms", "6.00 ms")
    assert f"of {drafted(rounds) / len(rounds):.3g} + 1 tokens" in [metric.delta for metric in app.metric]
    run = services.repository.get(run_id)
    assert run is not None
    assert run.summary is not None
    assert run.summary["mean_acceptance_length"] == pytest.approx(length)
    assert run.summary["draft_acceptance_rate"] == pytest.approx(rate)


def test_every_token_of_a_request_is_a_cell(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services)
    app = page("speculation", run=str(run_id), request="1")
    own = rounds_of(made.rounds, 1)
    assert len(own) <= MAX_ROUNDS
    assert drawn_cells(app) == expected_cells(own, 1)
    for row in charts(app, "token_id"):
        assert row["text"] == str(row["token_id"])  # the tokens of this model stand for no text
        assert (row["draft_ms"], row["verify_ms"]) == (DRAFT_MS, VERIFY_MS)
    bar = next(html.proto.body for html in app.get("html") if "tokens delivered" in html.proto.body)
    for kind, count in Counter(cell[2] for cell in expected_cells(own, 1)).items():
        assert f"{kind} <b>{count}</b>" in bar
    assert f"{LENGTHS[1] - 1} tokens delivered, {len(own)} rounds" in bar


def test_tokens_are_shown_as_their_text_where_the_tokenizer_is_there(services: FakeServices, tmp_path: Path) -> None:
    model = str(make_tiny_llama(tmp_path / "model"))
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    run_id, made = add_speculation_run(services, NGRAM | {"model.name": model})
    rows = charts(page("speculation", run=str(run_id), request="1"), "token_id")
    assert [row["text"] for row in rows] == [tokenizer.decode([row["token_id"]]) for row in rows]
    assert rows[0]["token_id"] == rounds_of(made.rounds, 1)[0].draft_token_ids[0]


def test_a_long_request_is_drawn_a_window_at_a_time(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services)
    own = rounds_of(made.rounds, 2)
    assert len(own) > 2 * MAX_ROUNDS
    app = page("speculation", run=str(run_id), request="2")
    assert drawn_cells(app) == expected_cells(own[:MAX_ROUNDS], 1)
    press(app, "Later")
    assert drawn_cells(app) == expected_cells(own[MAX_ROUNDS : 2 * MAX_ROUNDS], MAX_ROUNDS + 1)
    assert app.query_params["round"] == str(MAX_ROUNDS + 1)
    press(app, "Later")
    begin = min(2 * MAX_ROUNDS, len(own) - MAX_ROUNDS)
    assert drawn_cells(app) == expected_cells(own[begin : begin + MAX_ROUNDS], begin + 1)
    app = page("speculation", run=str(run_id), request="2", round="7")
    assert drawn_cells(app) == expected_cells(own[6 : 6 + MAX_ROUNDS], 7)
    app = page("speculation", run=str(run_id), request="2", round="999999")
    assert drawn_cells(app) == expected_cells(own[-MAX_ROUNDS:], len(own) - MAX_ROUNDS + 1)


def test_choosing_a_request_changes_the_address(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services)
    app = page("speculation", run=str(run_id))
    app.selectbox(key="speculation-request-select").select("1").run()
    assert app.query_params["request"] == "1"
    assert drawn_cells(app) == expected_cells(rounds_of(made.rounds, 1), 1)


def test_acceptance_by_position_and_over_time(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services)
    app = page("speculation", run=str(run_id))
    accepted: Counter[int] = Counter()
    rejected: Counter[int] = Counter()
    for _, column, kind, *_ in (
        cell for index in range(3) for cell in expected_cells(rounds_of(made.rounds, index), 1)
    ):
        if column != "then":
            accepted[int(column)] += kind == "accepted"
            rejected[int(column)] += kind == "rejected"
    shown = charts(app, "num_tested")
    assert [row["position"] for row in shown] == list(range(1, K + 1))
    for row in shown:
        # No output of these ends right before a rejected token whose round goes on behind its end.
        assert row["num_accepted"] == accepted[row["position"]]
        assert row["num_tested"] == accepted[row["position"]] + rejected[row["position"]] - _behind(made.rounds, row)
    curve = [row for row in charts(app, "series") if row["kind"] == "line"]
    last = made.rounds[-20:]
    assert curve[-1]["y"] == pytest.approx(1 + delivered(last) / 20)
    assert curve[-1]["x"] == pytest.approx(made.steps[-1].end_time - 100.0)


def _behind(rounds: Sequence[Round], row: dict[str, Any]) -> int:
    """Rounds whose first rejected token stands here, and whose output had ended before it."""
    return sum(
        each.num_accepted == row["position"] - 1 < len(each.draft_token_ids) and each.num_emitted < each.num_accepted
        for each in rounds
    )


def test_speedup_is_predicted_from_the_rounds_and_measured_beside_a_plain_run(services: FakeServices) -> None:
    plain_id, plain = add_plain_run(services)
    run_id, made = add_speculation_run(services)
    app = page("speculation", run=str(run_id), view="Speedup")
    assert app.query_params["with"] == str(plain_id)
    length = 1 + delivered(made.rounds) / len(made.rounds)
    costs = DRAFT_MS / PLAIN_MS, VERIFY_MS / PLAIN_MS
    predicted = length / sum(costs)  # all tokens but the first come out of rounds

    def tpot(requests: Sequence[Any]) -> float:
        values = [
            (it.emission_times[-1] - it.emission_times[0]) / (it.num_output_tokens - 1)
            for it in requests
            if not it.warmup
        ]
        return sum(values) / len(values)

    measured = tpot(plain.requests) / tpot(made.requests)
    shown = metrics(app)
    assert shown["Predicted"] == f"×{predicted:.3g}"
    assert shown["Measured"] == f"×{measured:.3g}"
    assert (shown["Draft"], shown["Verify"]) == (f"{costs[0]:.3f} steps", f"{costs[1]:.2f} steps")
    said = words(app)
    assert f"A round: {length:.3f} tokens / (0.375 draft + 1.500 verify) plain steps = ×{predicted:.2f}" in said
    assert f"Measured: ×{measured:.2f}" in said
    assert f"takes {OTHER_MS:.3f} ms and a plain one {PLAIN_OTHER_MS:.2f} ms" in said
    bars = charts(app, "speedup")
    assert [row["k"] for row in bars] == list(range(K + 1))
    assert bars[0]["speedup"] == 1
    best = max(bars, key=lambda row: row["speedup"])
    assert best["kind"] == "best"
    assert [row["kind"] for row in bars].count("best") == 1
    assert ("Best would have been no speculation" in said) == (best["k"] == 0)
    assert not app.warning


def test_of_trees_no_number_of_drafted_tokens_is_called_the_best(services: FakeServices) -> None:
    add_plain_run(services)
    trees = {"speculative.method": "eagle", "speculative.tree": True, "speculative.num_speculative_tokens": 3}
    run_id, _ = add_speculation_run(services, NGRAM | trees)
    app = page("speculation", run=str(run_id), view="Speedup")
    said = words(app)
    assert "Measured: ×" in said
    assert "worked out for chains, and not for trees" in said
    assert "Best would have been" not in said
    deltas = [metric.delta for metric in page("speculation", run=str(run_id)).metric]
    assert "eagle, trees, depth 3" in deltas
    assert "of whole trees" in deltas


def test_what_else_differs_is_said(services: FakeServices) -> None:
    plain_id, _ = add_plain_run(services, PLAIN | {"cache.block_size": 32})
    run_id, _ = add_speculation_run(services, lengths=(30, 12, 60))
    app = page("speculation", run=str(run_id), view="Speedup")
    assert "with" not in app.query_params  # other settings: nobody's choice but the viewer's
    app = page("speculation", run=str(run_id), view="Speedup", **{"with": str(plain_id)})
    assert "their other settings differ" in words(app)
    assert "1 of 3 requests have other answer lengths" in words(app)


def test_the_run_without_speculation_is_set_up_on_the_run_page(services: FakeServices) -> None:
    run_id, _ = add_speculation_run(services, NGRAM | {"cache.block_size": 32})
    app = page("speculation", run=str(run_id), view="Speedup")
    assert "There is none yet" in words(app)
    press(app, "Set up the run without speculation")
    form = {
        key: app.session_state[f"{PREFIX}{key}"] for key in ("speculative.method", "cache.block_size", "model.name")
    }
    assert form == {"speculative.method": "none", "cache.block_size": 32, "model.name": "dummy:tiny"}
    press(app, "Start")
    (_, config, _) = services.fake_queue.submitted[-1]
    assert (config.speculative.method, config.cache.block_size) == ("none", 32)


def test_who_drafts_is_chosen_on_the_run_page(services: FakeServices) -> None:
    app = page("run")
    app.selectbox(key=f"{PREFIX}speculative.method").select("ngram")
    app.number_input(key=f"{PREFIX}speculative.num_speculative_tokens").set_value(7)
    press(app, "Start")
    (_, config, _) = services.fake_queue.submitted[-1]
    assert (config.speculative.method, config.speculative.num_speculative_tokens) == ("ngram", 7)


def test_proposers_stand_side_by_side(services: FakeServices) -> None:
    plain_id, plain = add_plain_run(services, label="plain")
    add_speculation_run(services, seed=8)  # an older one of the settings that are shown
    others = NGRAM | {"speculative.num_speculative_tokens": 4, "speculative.adaptive": False}
    other_id, _ = add_speculation_run(services, others, seed=9)
    run_id, made = add_speculation_run(services)
    app = page("speculation", run=str(run_id), view="Proposers")
    table = app.dataframe[0].value
    assert table["Run"].tolist() == [f"#{run_id}", f"#{plain_id} plain", f"#{other_id}"]
    assert table["Proposer"].tolist() == ["ngram, k = 3", "without speculation", "ngram, k = 4, always"]
    assert table["Acceptance length"][0] == f"{1 + delivered(made.rounds) / len(made.rounds):.2f} tok"
    assert table["Acceptance rate"].tolist()[1] == "–"

    def rate(requests: Sequence[Any]) -> float:
        measured = [it for it in requests if not it.warmup]
        span = max(it.finish_time for it in measured) - min(it.arrival_time for it in measured)
        return sum(it.num_output_tokens for it in measured) / span

    assert table["Speedup"][0] == f"×{rate(made.requests) / rate(plain.requests):.3g}"
    app.multiselect(key="speculation-beside-select").unselect(plain_id).run()
    assert app.dataframe[0].value["Run"].tolist() == [f"#{run_id}", f"#{other_id}"]
    assert app.query_params["beside"] == str(other_id)


def test_a_label_that_says_how_a_run_speculates_is_said_once(services: FakeServices) -> None:
    add_plain_run(services, label="without speculation")
    add_plain_run(services, PLAIN | {"cache.block_size": 32}, label="blocks")
    add_speculation_run(services)
    app = page("speculation", view="Speedup")
    names = app.selectbox(key="speculation-with-select").options
    assert names == ["#2 blocks: without speculation, other settings", "#1 without speculation"]
    assert [name.count("without speculation") for name in app.selectbox(key="speculation-run").options] == [0, 1, 1]


def test_a_run_that_goes_on_shows_what_there_is(services: FakeServices) -> None:
    made = make_run()
    run_id, recorder = start_speculation_run(services)
    services.fake_queue.live_run = LiveRun(run_id)
    assert f"Run #{run_id} is running; its rounds appear here" in words(page("speculation"))
    feed(recorder, made, num_chunks=2, requests=False)
    known = [each for each in made.rounds if each.step <= made.chunks[1].last_step]
    app = page("speculation")
    # Who is not recorded yet is known to be the warm-up by its name.
    assert metrics(app)["Rounds"] == str(len(known))
    assert drawn_cells(app)[-1][3] == known[-1].token_id
    feed(recorder, made._replace(chunks=made.chunks[2:], steps=[]))
    end(recorder, made)
    services.fake_queue.live_run = None
    app.run()
    assert metrics(app)["Rounds"] == str(len(made.rounds))


def test_a_damaged_ledger_is_told_in_words(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services)

    def damage(first_step: int) -> None:
        with services.database.write() as session:
            chosen = (ChunkRow.run_id == run_id, ChunkRow.kind == SPECULATION_KIND, ChunkRow.first_step >= first_step)
            session.execute(update(ChunkRow).where(*chosen).values(data=b"damaged"))

    app = page("speculation", run=str(run_id))
    assert not app.warning
    damage(made.chunks[2].first_step)
    app = page("speculation", run=str(run_id))
    last = made.chunks[1].last_step
    assert f"rounds up to step {last} are shown: the speculation ledger is damaged" in words(app)
    assert metrics(app)["Rounds"] == str(sum(each.step <= last for each in made.rounds))
    damage(0)
    assert f"The rounds of run #{run_id} cannot be shown: the speculation ledger is damaged" in words(
        page("speculation", run=str(run_id))
    )


def test_rounds_that_are_gone_are_counted(services: FakeServices) -> None:
    run_id, made = add_speculation_run(services)
    lost = made.chunks[1]
    with services.database.write() as session:
        gone = (ChunkRow.run_id == run_id, ChunkRow.kind == SPECULATION_KIND, ChunkRow.first_step == lost.first_step)
        session.execute(delete(ChunkRow).where(*gone))
    missing = sum(lost.first_step <= each.step <= lost.last_step for each in made.rounds)
    assert f"{missing} rounds are not in its ledger" in words(page("speculation", run=str(run_id)))


def test_what_an_address_cannot_name_is_said(services: FakeServices) -> None:
    run_id, _ = add_speculation_run(services)
    assert "There is no run 77 of a workload" in words(page("speculation", run="77", request="1"))
    assert "No round of this run is of a request 9" in words(page("speculation", run=str(run_id), request="9"))
    app = page("speculation", run=str(run_id), view="Speedup", **{"with": "9"})
    assert "Run #9 is no finished run of this workload" in words(app)


def test_detail_and_compare_show_what_was_accepted(services: FakeServices) -> None:
    plain_id, _ = add_plain_run(services)
    run_id, made = add_speculation_run(services)
    length = f"{1 + delivered(made.rounds) / len(made.rounds):.2f} tok"
    app = page("detail", run=str(run_id), view="All figures")
    assert length in app.table[0].value.to_string()
    assert "Speculation" in [link.label for link in app.get("page_link")]
    app = page("compare", runs=f"{plain_id},{run_id}")
    assert length in app.dataframe[0].value.to_string()
    assert "Speculation" not in [link.label for link in page("detail", run=str(plain_id)).get("page_link")]
