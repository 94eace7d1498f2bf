"""The Kernels page in every state, and what other pages do with kernel runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from streamlit.testing.v1 import AppTest

from app.components import kernel_charts
from app.components.kernel_form import RUN
from backend.experiments.kernel_graphs import DEFAULT_MODEL, DecodeStep
from backend.metrics.live import LiveRun
from backend.metrics.stats import Phase
from kernels.registry import REGISTRY
from tests.app.kernel_runs import add_kernel_run, attention_result, bench_result, check_result
from tests.app.pages import page, press, tick, words
from tests.app.stored_runs import FakeServices, add_run

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")


def table(app: AppTest, place: int = 0) -> dict[str, dict[str, object]]:
    return app.dataframe[place].value.set_index("Op").to_dict("index")


def test_an_empty_page_says_what_fills_it_and_offers_it(services: FakeServices) -> None:
    app = page("kernels")
    assert "Nothing measured yet" in words(app)
    assert [button.label for button in app.button] == ["Check and time"]
    assert app.multiselect[0].options == list(REGISTRY)


@on_cpu
def test_the_button_queues_a_run_of_what_is_chosen_and_shows_it(services: FakeServices) -> None:
    app = page("kernels")
    app.multiselect[0].set_value(["rms_norm"]).run()
    app.selectbox(key="kernel-dtype").set_value("float16").run()
    press(app, "Check and time")
    assert [run_id for run_id, _ in services.fake_queue.tasks] == [1]
    run = services.repository.get(1)
    assert run is not None
    assert (run.kind, run.status, run.model, run.workload) == ("kernels", "queued", "", {})
    assert (run.config["ops"], run.config["dtype"], run.config["experiments"]) == (
        ["rms_norm"],
        "float16",
        ["check", "bench"],
    )
    assert app.session_state[RUN] == 1
    assert app.query_params["run"] == "1"


def test_a_run_shows_figures_roofline_and_table(services: FakeServices) -> None:
    failed = check_result(
        "silu_and_mul", passed=False, max_abs_error=0.5, problem="1 of 6 elements of output are wrong"
    )
    add_kernel_run(
        services,
        [
            check_result("rms_norm"),
            failed,
            bench_result("rms_norm"),
            bench_result("silu_and_mul", p50_us=20.0),
            bench_result("store_kv_cache", flops=0, tflop_per_s=0.0),
            {**bench_result("rms_norm", "huge"), "p50_us": None, "share_of_limit": None, "problem": "it does not fit"},
        ],
        status="failed",
        error="silu_and_mul, default: 1 of 6 elements of output are wrong",
        notices=("a notice",),
    )
    app = page("kernels", run="1")
    assert [metric.value for metric in app.metric] == ["3,000 GB/s", "700 TFLOP/s", "1 of 2", "50.0 %"]
    rows = table(app)
    assert rows["rms_norm"]["Share of limit"] == pytest.approx(50.0)
    assert rows["rms_norm"]["Kernel's check"] == "passed"
    assert rows["silu_and_mul"]["Kernel's check"] == "FAILED"
    assert rows["store_kv_cache"]["Kernel's check"] == "not checked"
    text = words(app)
    for said in ("1 of 6 elements", "a notice", "not in the picture: store_kv_cache", "rms_norm huge: it does not fit"):
        assert said in text


def test_of_many_ops_those_closest_to_a_limit_are_coloured_until_others_are_chosen(services: FakeServices) -> None:
    names = [f"op{index}" for index in range(10)]
    rows = [bench_result(name, p50_us=10.0 + index) for index, name in enumerate(names)]
    add_kernel_run(services, [*rows, bench_result("copy", flops=0, p50_us=5.1)], experiments=["bench"])
    add_kernel_run(services, [bench_result(name) for name in names[3:6]], experiments=["bench"])
    app = page("kernels", run="1")
    coloured = app.multiselect(key="kernel-coloured")
    assert (coloured.value, coloured.options) == (names[:3], names)
    coloured.set_value(["op9", "op4"]).run()
    assert app.multiselect(key="kernel-coloured").value == ["op9", "op4"]
    app.selectbox(key=RUN).set_value(2).run()
    assert app.multiselect(key="kernel-coloured").value == ["op4"], "what this run has of those"
    app.multiselect(key="kernel-coloured").set_value([]).run()
    assert app.multiselect(key="kernel-coloured").value == []
    assert page("kernels", run="2").multiselect(key="kernel-coloured").value == names[3:6], (
        "all: there are colours enough"
    )


def test_checks_have_their_errors_in_a_table_of_their_own(services: FakeServices) -> None:
    add_kernel_run(services)
    assert table(page("kernels", run="1"), 1)["rms_norm"]["Max abs error"] == "0.00400"


def test_which_implementation_is_timed_stands_where_both_are(services: FakeServices) -> None:
    both = [bench_result("rms_norm"), bench_result("silu_and_mul", implementation="reference")]
    add_kernel_run(services, both, experiments=["bench"])
    rows = table(page("kernels", run="1"))
    assert (rows["rms_norm"]["Timed"], rows["silu_and_mul"]["Timed"]) == ("kernel", "reference")
    add_kernel_run(services, both[1:], experiments=["bench"])
    assert "Timed" not in table(page("kernels", run="2"))["silu_and_mul"]


def test_a_read_limit_that_was_measured_again_is_the_one_shown(services: FakeServices) -> None:
    faster = bench_result("silu_and_mul", p50_us=4.9, read_limit_gb_per_s=3100.0, share_of_limit=15e6 / 4.9e-6 / 3.1e12)
    add_kernel_run(services, [bench_result("rms_norm"), faster], experiments=["bench"])
    app = page("kernels", run="1")
    assert app.metric[0].value == "3,100 GB/s"
    (roofline,) = app.get("vega_lite_chart")
    assert "The line: 3,100 GB/s read" in roofline.proto.spec


def test_interpreted_checks_say_so(services: FakeServices) -> None:
    add_kernel_run(
        services, [check_result("rms_norm", interpreted=True), bench_result("rms_norm", implementation="reference")]
    )
    assert table(page("kernels"))["rms_norm"]["Kernel's check"] == "passed, interpreted"


def test_runs_are_compared_against_the_first_chosen(services: FakeServices) -> None:
    add_kernel_run(services, label="before")
    add_kernel_run(services, [bench_result("rms_norm", p50_us=5.0)], label="after")
    app = page("kernels", run="2", **{"with": "1"})
    (compared,) = app.dataframe[-1].value.to_dict("records")
    assert list(compared.values()) == ["rms_norm", "decode", "bfloat16", "Triton kernel", "10.0", "5.00  (×2.00)"]
    assert "torch 2.11.0, triton 3.6.0, commit abc" in words(app)
    app = page("kernels", run="1", **{"with": "99,2"})
    assert app.multiselect(key="kernel-with").value == [2]


def test_runs_without_anything_in_common_are_told(services: FakeServices) -> None:
    add_kernel_run(services)
    add_kernel_run(services, [bench_result("silu_and_mul")])
    assert "no op, shape, dtype and implementation in common" in words(page("kernels", run="2", **{"with": "1"}))


@pytest.mark.parametrize(("asked", "said"), [("99", "no kernel run 99"), ("x", "no kernel run x")])
def test_an_address_that_names_no_kernel_run(services: FakeServices, asked: str, said: str) -> None:
    add_kernel_run(services)
    app = page("kernels", run=asked)
    assert said in words(app)
    assert app.query_params["run"] == "1", "the newest is shown instead"


def test_a_run_that_goes_on_shows_how_far_it_is_and_can_be_cancelled(services: FakeServices) -> None:
    run_id = services.repository.create({"experiments": ["bench"], "ops": None, "dtype": None}, {}, kind="kernels")
    live = services.fake_queue.live_run = LiveRun(run_id)
    live.on_phase(Phase("timing rms_norm,", 3, 14))
    app = page("kernels", run=str(run_id))
    assert "Add to queue" in [button.label for button in app.button]
    press(app, "Cancel")
    assert services.fake_queue.cancelled == [run_id]
    app = page("run")
    assert f"Kernel run #{run_id}" in [link.label for link in app.get("page_link")]


# Attention, graphs


@on_cpu
def test_the_attention_comparison(services: FakeServices) -> None:
    app = page("kernels", view="Attention over length")
    assert "No comparison yet" in words(app)
    press(app, "Compare attention")
    run = services.repository.get(1)
    assert run is not None
    assert run.config["experiments"] == ["attention"]
    rows = [attention_result(name, length) for length in (512, 1024) for name in ("unfused", "paged, ours")]
    add_kernel_run(services, rows, experiments=("attention",))
    app = page("kernels", view="Attention over length")
    assert len(app.get("vega_lite_chart")) == 2
    assert "At 1,024 tokens: unfused 0.102 ms and 1.00 MiB; paged, ours 0.102 ms" in words(app)


@on_cpu
def test_graphs_need_a_gpu(services: FakeServices) -> None:
    app = page("kernels", view="CUDA graphs")
    assert "This needs a GPU" in words(app)
    assert next(button for button in app.button if button.key == "graphs-start").disabled


def test_a_pair_of_runs_shows_what_graphs_do(services: FakeServices) -> None:
    settings = {"model.name": DEFAULT_MODEL, "kernels.backend": "triton"}
    add_run(services, settings | {"kernels.enforce_eager": False})
    add_run(services, settings | {"kernels.enforce_eager": True})
    app = page("kernels", view="CUDA graphs")
    assert len(app.get("vega_lite_chart")) == 1
    assert "Compare #1 with #2" in [link.label for link in app.get("page_link")]


# Other pages


def test_history_shows_kernel_runs_and_compares_them_on_their_page(services: FakeServices) -> None:
    add_run(services)
    add_kernel_run(services, label="before")
    add_kernel_run(services, label="after")
    app = page("history")
    assert list(app.dataframe[0].value["workload"][:2]) == ["kernels: check, bench of all ops"] * 2
    tick(app, services.repository.list(), 0, 2)
    assert next(button for button in app.button if button.label == "Compare").disabled, "a workload beside a kernel run"
    tick(app, services.repository.list(), 0, 1)
    press(app, "Compare")
    assert app.title[0].value == "Kernels"
    assert (app.query_params["run"], app.query_params["with"]) == ("3", "2")


def test_a_kernel_runs_detail_is_the_kernels_page(services: FakeServices) -> None:
    add_kernel_run(services)
    add_kernel_run(services, [attention_result("unfused", 512)], experiments=("attention",))
    assert page("detail", run="1").title[0].value == "Kernels"
    app = page("detail", run="2")
    assert app.title[0].value == "Kernels"
    assert app.query_params["view"] == "Attention over length"


def test_serving_pages_leave_kernel_runs_out(services: FakeServices) -> None:
    add_run(services)
    add_kernel_run(services)
    assert "there is one so far" in words(page("compare"))


# Charts


def test_the_roofline_has_a_roof_and_a_point_per_timing() -> None:
    rows = [bench_result("a"), bench_result("b", flops=0), bench_result("a", implementation="reference", p50_us=30.0)]
    spec = kernel_charts.roofline(rows, read_gb_per_s=3000.0, matmul_tflop_per_s=700.0).to_dict()
    roof, points = (spec["datasets"][layer["data"]["name"]] for layer in spec["layer"])
    assert [row["op"] for row in points] == ["a", "a"]
    assert points[0]["intensity"] == pytest.approx(2.0)
    low, ridge, high = roof
    assert ridge["x"] == pytest.approx(700e12 / 3000e9)
    assert (ridge["y"], high["y"]) == (pytest.approx(700.0), 700.0)
    assert low["y"] == pytest.approx(low["x"] * 3000e9 / 1e12)
    scales = [layer["encoding"][axis]["scale"]["type"] for layer in spec["layer"] for axis in "xy"]
    assert scales == ["log"] * 4


def drawn(layer: dict[str, Any], datasets: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """The colour of each op's points."""
    scale = layer["encoding"]["color"]["scale"]
    colours = dict(zip(scale["domain"], scale["range"], strict=True))
    return {row["op"]: colours[row["shown"]] for row in datasets[layer["data"]["name"]]}


@pytest.mark.parametrize("num_coloured", [2, 3, 7])
def test_ops_that_are_asked_for_have_each_a_colour_of_their_own_and_a_name(num_coloured: int) -> None:
    names = [f"op{index}" for index in range(30)]
    rows = [bench_result(name, p50_us=time) for name in names for time in (10.0, 20.0)]
    asked = names[5 : 5 + num_coloured]
    spec = kernel_charts.roofline(rows, read_gb_per_s=3000.0, matmul_tflop_per_s=700.0, coloured=asked).to_dict()
    _, points, *texts = spec["layer"]
    colours = drawn(points, spec["datasets"])
    assert len(colours) == 30
    assert len({colours[name] for name in asked}) == num_coloured
    (grey,) = {colours[name] for name in names if name not in asked}
    assert grey not in {colours[name] for name in asked}
    has_legend = points["encoding"]["color"]["legend"] is not None
    labelled = [row["op"] for text in texts for row in spec["datasets"][text["data"]["name"]]]
    assert has_legend == (num_coloured > 3)
    assert labelled == ([] if has_legend else asked)
    heights = [text["mark"]["dy"] for text in texts]
    assert all(below - above >= 12 for above, below in pairwise(heights)), "at one place, and legible"


def test_a_roofline_needs_no_points() -> None:
    spec = kernel_charts.roofline([], read_gb_per_s=3000.0, matmul_tflop_per_s=700.0).to_dict()
    assert len(spec["layer"]) == 2


def test_graph_bars_hold_every_part_of_both() -> None:
    steps = {"on": DecodeStep(2.0, 0.5, 1.5, 100), "off": DecodeStep(5.0, 0.5, 4.5, 100)}
    spec = kernel_charts.graph_bars(steps).to_dict()
    (rows,) = spec["datasets"].values()
    assert [(row["run"], row["ms"]) for row in rows] == [
        (name, ms) for name, s in steps.items() for ms in (s.duration_ms, s.execute_ms, s.host_ms)
    ]
