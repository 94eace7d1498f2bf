"""The Quantization page in every state, and what other pages do with quantization runs."""

from __future__ import annotations

import re
from html import unescape

import pytest
from streamlit.testing.v1 import AppTest

from app.components.quantization_form import RUN
from app.components.quantization_matrix import matrix_html
from app.components.quantization_take_away import model_command
from backend.experiments.quantization_config import DEFAULT_VARIANTS, parse_variant
from backend.experiments.quantization_results import EMULATED
from backend.metrics.live import LiveRun
from backend.metrics.stats import Phase
from tests.app.pages import page, press, tick, words
from tests.app.quantization_runs import add_quantization_run, emulated, reference, result
from tests.app.stored_runs import FakeServices, add_run


def html(app: AppTest) -> list[str]:
    """The tables of the page."""
    return [element.proto.body for element in app.get("html") if "sl-matrix" in element.proto.body]


def table(source: str) -> dict[str, list[tuple[str, str]]]:
    """(title, text) of each cell of a matrix, by variant."""
    rows = {}
    for variant, body in re.findall(r'<tr[^>]*data-variant="([^"]*)">(.*?)</tr>', source):
        cells = re.findall(r"<td([^>]*)>(.*?)</td>", body)
        titles = [re.search(r'title="([^"]*)"', attributes) for attributes, _ in cells]
        rows[variant] = [
            (unescape(title[1]) if title else "", unescape(re.sub(r"<[^>]*>", " ", text)).strip())
            for title, (_, text) in zip(titles, cells, strict=True)
        ]
    return rows


def heads(source: str) -> list[str]:
    return re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', source)[1:]


def test_an_empty_page_says_what_fills_it_and_offers_it(services: FakeServices) -> None:
    app = page("quantization")
    assert "Nothing measured yet" in words(app)
    assert [button.label for button in app.button] == ["Measure"]
    assert app.multiselect[0].value == list(DEFAULT_VARIANTS)
    assert "a few minutes" in words(app)


def test_the_button_queues_a_run_of_what_is_chosen_and_shows_it(services: FakeServices) -> None:
    app = page("quantization")
    app.selectbox(key="quantization-model").set_value("dummy:tiny").run()
    app.multiselect[0].set_value(["nf4", "int4:bits=3"]).run()
    app.number_input(key="quantization-tokens").set_value(512).run()
    press(app, "Measure")
    assert [run_id for run_id, _ in services.fake_queue.tasks] == [1]
    run = services.repository.get(1)
    assert run is not None
    assert (run.kind, run.status, run.model, run.workload) == ("quantization", "queued", "dummy:tiny", {})
    assert (run.config["variants"], run.config["max_tokens"]) == (["nf4", "int4:bits=3"], 512)
    assert app.session_state[RUN] == 1
    assert app.query_params["run"] == "1"


def test_what_cannot_be_measured_is_named_and_queues_nothing(services: FakeServices) -> None:
    app = page("quantization")
    app.text_input(key="quantization-text").set_value("/nowhere/text.txt").run()
    press(app, "Measure")
    assert "/nowhere/text.txt cannot be read as UTF-8 text" in words(app)
    app.text_input(key="quantization-text").set_value("").run()
    app.text_input(key="quantization-calibration").set_value("/nowhere/lines.jsonl").run()
    press(app, "Measure")
    assert "/nowhere/lines.jsonl cannot be read as UTF-8 text" in words(app)
    app.multiselect[0].set_value([]).run()
    press(app, "Measure")
    assert "variants" in words(app)
    assert services.repository.count() == 0


def test_a_run_shows_a_matrix_with_differences_a_picture_and_how_long_it_took(services: FakeServices) -> None:
    add_quantization_run(services, status="failed", error="gptq: dummy:tiny has no files")
    app = page("quantization", run="1")
    (source,) = html(app)
    rows, columns = table(source), heads(source)
    assert list(rows) == ["reference", "int8", "nf4", "gptq"]
    weights, speed = columns.index("Weights"), columns.index("Decode ×1, tok/s")
    assert rows["reference"][weights][1] == "400 MiB"
    assert rows["int8"][weights][1].split() == ["100", "MiB", "−75.0", "%"]
    assert rows["int8"][columns.index("Perplexity")][1].split() == ["20.50", "+2.5", "%"]
    assert rows["int8"][columns.index("Δp, %")][1] == "−0.27 ± 0.02"
    assert rows["int8"][speed][1].split() == ["40.0", "×2.00"]
    best = {
        variant: [title == "Best of the variants, and no worse than the reference" for title, _ in cells]
        for variant, cells in rows.items()
    }
    assert (best["nf4"][weights], best["int8"][weights], best["reference"][weights]) == (True, False, False)
    assert best["int8"][columns.index("KL, nats")]
    assert rows["gptq"] == [("", "dummy:tiny has no files <b>at all</b>")]
    assert 'title="method = int8, group_size = 64">int8<' in source
    assert "<b>at all" not in source
    text = words(app)
    for said in ("gptq: dummy:tiny has no files", "a notice", "2,046 tokens of the text that ships"):
        assert said in text
    assert len(app.get("vega_lite_chart")) == 1 + 4


def test_an_emulated_variant_has_no_speed_and_says_why(services: FakeServices) -> None:
    add_quantization_run(services)
    (source,) = html(page("quantization"))
    rows, columns = table(source), heads(source)
    for name in ("Decode ×1, tok/s", "Decode ×32, tok/s", "Prefill, tok/s"):
        assert rows["nf4"][columns.index(name)] == (EMULATED, "–")
        assert rows["int8"][columns.index(name)][1] != "–"


def test_all_emulated_still_says_why_there_is_no_speed() -> None:
    source = matrix_html(
        [row | {"part": None, "problem": None, "peak_memory_bytes": None} for row in (emulated("nf4"), emulated("fp8"))]
    )
    assert "Decode ×1, tok/s" in heads(source)
    assert table(source)["nf4"][heads(source).index("Decode ×1, tok/s")] == (EMULATED, "–")


def test_an_emulated_variant_is_not_in_a_picture_of_speeds(services: FakeServices) -> None:
    add_quantization_run(services)
    app = page("quantization")
    app.segmented_control(key="quantization-cost").set_value("decode_1_tok_s").run()
    assert not app.exception
    assert "have no such speed" in words(app)


def test_the_default_models_own_grid_is_explained_where_a_variant_has_its_groups(services: FakeServices) -> None:
    on_it = [reference(), result("int4:group_size=32,zero_point=float")]
    add_quantization_run(services, on_it, model="smollm2-135m")
    assert "was published in Q4_1" in words(page("quantization", run="1"))
    add_quantization_run(services, on_it, model="dummy:tiny")
    assert "Q4_1" not in words(page("quantization", run="2"))
    add_quantization_run(services, [reference(), result("int4:group_size=64")], model="smollm2-135m")
    assert "Q4_1" not in words(page("quantization", run="3"))


def test_two_runs_are_set_beside_each_other(services: FakeServices) -> None:
    add_quantization_run(services, [reference(), result("int8", perplexity=41.0), result("fp8")], label="before")
    add_quantization_run(services, [reference(), result("int8"), emulated("nf4")], label="after", max_tokens=512)
    app = page("quantization", run="2", **{"with": "1"})
    _, beside = html(app)
    rows, columns = table(beside), heads(beside)
    assert list(rows) == ["reference", "int8"]
    assert rows["int8"][columns.index("Perplexity")][1].split() == ["20.50", "−50.0", "%"]
    assert "tokens 512, there 2048" in words(app)
    app = page("quantization", run="1", **{"with": "99"})
    assert len(html(app)) == 1
    assert "with" not in app.query_params


def test_runs_without_a_variant_in_common_are_told(services: FakeServices) -> None:
    add_quantization_run(services, [result("int8")])
    add_quantization_run(services, [emulated("nf4")])
    assert "no variant in common" in words(page("quantization", run="2", **{"with": "1"}))


@pytest.mark.parametrize("asked", ["99", "x"])
def test_an_address_that_names_no_quantization_run(services: FakeServices, asked: str) -> None:
    add_quantization_run(services)
    app = page("quantization", run=asked)
    assert f"no quantization run {asked}" in words(app)
    assert app.query_params["run"] == "1", "the newest is shown instead"


def test_a_run_that_goes_on_shows_what_it_has_and_can_be_cancelled(services: FakeServices) -> None:
    run_id = services.repository.create(
        {"model": "dummy:tiny", "experiment": "compare", "variants": ["int8"]}, {}, kind="quantization"
    )
    services.repository.add_quantization_result(run_id, reference())
    live = services.fake_queue.live_run = LiveRun(run_id)
    live.on_phase(Phase("int8: scoring 50%, variants done", 1, 2))
    app = page("quantization", run=str(run_id))
    assert [list(table(source)) for source in html(app)] == [["reference"]]
    assert "Add to queue" in [button.label for button in app.button]
    press(app, "Cancel")
    assert services.fake_queue.cancelled == [run_id]
    assert f"Quantization run #{run_id}" in [link.label for link in page("run").get("page_link")]


def test_how_long_it_took_last_time_is_said_of_the_same_model(services: FakeServices) -> None:
    add_quantization_run(services, model="dummy:tiny")
    app = page("quantization")
    app.selectbox(key="quantization-model").set_value("dummy:tiny").run()
    assert re.search(r"Last time 3 variants took .* \(#1\)", words(app))


# Layers, weights, take away


def test_layers_without_an_entry_and_outliers_are_named(services: FakeServices) -> None:
    folded = result("awq", layers=None, layers_problem="scales are folded into the norms")
    add_quantization_run(services, [reference(), result("int8"), folded])
    app = page("quantization")
    assert "awq is not in the picture: scales are folded into the norms" in words(app)
    rows = app.dataframe[0].value.to_dict("records")
    assert rows[0] == {"Layer": 1, "Kind": "Down", "Channel": 7, "Times the median": 40.0}
    assert len(rows) == 8


def test_a_run_without_layers_says_how_to_get_them(services: FakeServices) -> None:
    add_quantization_run(services, [reference(), result("none:kv=int8", layers=None)])
    assert "measured no layers" in words(page("quantization"))
    assert "No variant of this run has weights on a grid" in words(page("quantization", view="Weights"))


def test_weights_are_shown_on_the_grid_of_a_variant(services: FakeServices) -> None:
    add_quantization_run(services)
    app = page("quantization", view="Weights")
    assert len(app.get("vega_lite_chart")) == 2
    assert "10,240 weights, each in the scale that it shares with 64 inputs" in words(app)
    app.number_input(key="quantization-weights-layer").set_value(99).run()
    assert "dummy:tiny has no layer 99" in words(app)


def test_what_is_taken_away_makes_the_variant_again(services: FakeServices) -> None:
    add_quantization_run(services, [reference(), result("int4:group_size=32,zero_point=integer"), result("nf4")])
    app = page("quantization", view="Take it away")
    command, toml, run = [code.value for code in app.code]
    assert command == (
        "servelab quantize dummy:tiny --method int4 --group-size 32 --zero-point integer -o dummy-tiny-int4"
    )
    assert toml.splitlines() == [
        "[model]",
        'name = "dummy:tiny"',
        "",
        "[quantization]",
        'method = "int4"',
        "group_size = 32",
        'zero_point = "integer"',
    ]
    assert "--set 'quantization.group_size=32'" in run or "--set quantization.group_size=32" in run
    press(app, "Open on the Run page")
    assert app.title[0].value == "Run"
    assert app.session_state["form:quantization.method"] == "int4"
    app = page("quantization", view="Take it away")
    app.selectbox(key="quantization-taken").set_value("nf4").run()
    assert "the compressed-tensors format does not have nf4" in words(app)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("int8", "servelab quantize m --method int8 -o m-int8"),
        (
            "gptq:bits=3",
            "servelab quantize m --method gptq --bits 3 --zero-point integer --windows 16 --window-length 256 -o m-gptq",
        ),
        (
            "int4:zero_point=integer,head=int8,skip=*.down_proj,skip=model.layers.0.*",
            "servelab quantize m --method int4 --zero-point integer --head int8 --skip '*.down_proj' "
            "--skip 'model.layers.0.*' -o m-int4",
        ),
        ("fp8:granularity=tensor", "servelab quantize m --method fp8 --granularity tensor -o m-fp8"),
        ("int4", None),  # a floating minimum
        ("none:kv=int8", None),
        ("llm_int8", None),
    ],
)
def test_the_command_of_a_variant(variant: str, expected: str | None) -> None:
    assert model_command("m", parse_variant(variant)) == expected
    if expected and "gptq" in expected:
        own = model_command("m", parse_variant(variant), "/a text.jsonl")
        assert own == expected.replace(" -o", " --calibration '/a text.jsonl' -o")


# Other pages


def test_history_shows_quantization_runs_and_compares_them_on_their_page(services: FakeServices) -> None:
    add_run(services)
    add_quantization_run(services, label="before")
    add_quantization_run(services, label="after")
    app = page("history")
    assert list(app.dataframe[0].value["workload"][:2]) == ["quantization: int8, nf4, gptq"] * 2
    assert list(app.dataframe[0].value["model"][:2]) == ["dummy:tiny"] * 2
    tick(app, services.repository.list(), 0, 1)
    press(app, "Compare")
    assert app.title[0].value == "Quantization"
    assert (app.query_params["run"], app.query_params["with"]) == ("3", "2")


def test_a_quantization_runs_detail_is_the_quantization_page(services: FakeServices) -> None:
    add_quantization_run(services)
    assert page("detail", run="1").title[0].value == "Quantization"
