"""The pictures of the quantization lab, by their specs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from app.components import quantization_charts
from tests.app.quantization_runs import NUM_LAYERS, reference, result


def test_the_frontier_leaves_out_what_another_beats() -> None:
    rows = [
        reference(problem=None, part=None),
        result("int8", kl_mean=0.003, weights_bytes=100),
        result("fp8", kl_mean=0.02, weights_bytes=100),
        result("nf4", kl_mean=0.2, weights_bytes=50),
    ]
    spec = quantization_charts.pareto(rows, "weights_bytes", "kl_mean").to_dict()
    (points,) = spec["datasets"].values()
    assert {row["name"]: row["best"] for row in points} == {"int8": True, "fp8": False, "nf4": True}
    assert spec["layer"][1]["encoding"]["y"]["scale"]["type"] == "log"


def test_a_heat_map_has_a_cell_for_each_layer_and_variant() -> None:
    cells = [
        {"variant": variant, "layer": layer, "kind": kind, "output_error": 0.01 * (layer + 1), "weight_error": 0.01}
        for variant in ("int8", "nf4")
        for layer in range(NUM_LAYERS)
        for kind in ("qkv", "down")
    ]
    domain = quantization_charts.error_domain(cells)
    assert domain == (0.01, 0.03)
    for legend in (True, False):
        spec = quantization_charts.heat_map(cells, "qkv", domain, legend=legend).to_dict()
        (data,) = spec["datasets"].values()
        assert len(data) == 2 * NUM_LAYERS
        assert spec["encoding"]["color"]["scale"]["domain"] == [0.01, 0.03]
        assert (spec["encoding"]["color"]["legend"] is not None) == legend
        assert spec["height"] == {"step": 22}, "a row has room for its name, whatever title, axis and legend take"


@pytest.mark.parametrize(("num_levels", "mark"), [(16, "rule"), (255, "tick")])
def test_many_levels_do_not_cover_the_bars(num_levels: int, mark: str) -> None:
    spec = quantization_charts.histogram(
        [0.0, 1.0, 2.0], [3, 4], list(range(num_levels)), title="t", x_title="x"
    ).to_dict()
    assert spec["layer"][1]["mark"]["type"] == mark


def test_names_of_points_at_one_place_are_spread_around_it() -> None:
    """And those that stand alone stay at their points. In the logarithm, which the axis shows."""
    losses = {"int8": 0.003, "w8a8_int8": 0.02, "fp8": 0.021, "llm_int8": 0.02}
    rows = [result(variant, kl_mean=loss, weights_bytes=100) for variant, loss in losses.items()]
    spec = quantization_charts.pareto(rows, "weights_bytes", "kl_mean").to_dict()
    (points,) = spec["datasets"].values()
    low, high = spec["layer"][1]["encoding"]["y"]["scale"]["domain"]
    places = {row["name"]: math.log(row["label_y"] / low) / math.log(high / low) for row in points}
    assert places.pop("int8") == pytest.approx(math.log(0.003 / low) / math.log(high / low))
    steps = [upper - lower for lower, upper in pairwise(sorted(places.values()))]
    assert min(steps) > 0.04
    own = [math.log(loss / low) / math.log(high / low) for variant, loss in losses.items() if variant != "int8"]
    assert sum(places.values()) == pytest.approx(sum(own))
    assert max(places, key=lambda name: places[name]) == "fp8"
