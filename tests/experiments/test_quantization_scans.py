"""Scans of the quantization lab against the measures that they call, called alone, and what their stored rows say."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.experiments.layer_error import scan_sensitivity
from backend.experiments.quality import load_pair
from backend.experiments.quantization_config import REFERENCE, QuantizationLabConfig
from backend.experiments.quantization_lab import DEFAULT_TEXT
from backend.experiments.quantization_ranges import by_tail, codes_left, furthest, stored_ranges, tail
from backend.experiments.quantization_results import scanned_layers, wholes
from backend.experiments.ranges import ACTIVATIONS, EXPECTED_ORDER, KV, Range, measure_ranges
from backend.experiments.text_pass import TextModel
from backend.metrics.stats import Phase
from backend.models.sources import resolve_source
from backend.tokenizer import load_tokenizer
from tests.experiments.quantizing import TOKENS, Sink, run

LAYERS = [
    f"layers.{layer}.{name}"
    for layer in range(3)
    for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
]


def ids() -> list[int]:
    return load_tokenizer(resolve_source("dummy:tiny")).encode(DEFAULT_TEXT.read_text(encoding="utf-8"))[:TOKENS]


def pair(method: str) -> tuple[TextModel, TextModel]:
    source = resolve_source("dummy:tiny")
    config = EngineConfig().with_overrides({"quantization.method": method})
    model, reference = load_pair(source, config, (source, EngineConfig()))
    assert reference is not None
    return model, reference


@pytest.mark.parametrize(
    ("by", "parts"), [("kind", ["qkv", "output", "gate_up", "down", "all"]), ("layer", [*LAYERS, "all"])]
)
def test_a_scan_has_a_row_for_each_part(by: Any, parts: list[str]) -> None:
    sink = Sink()
    end, rows = run(["nf4"], sink, experiment="sensitivity", by=by)
    assert end.status == "finished"
    expected = scan_sensitivity(*pair("nf4"), ids(), by)
    assert [row["part"] for row in rows] == [each.part for each in expected] == parts
    assert [row["num_layers"] for row in rows] == [each.num_layers for each in expected]
    assert [row["kl_mean"] for row in rows] == [each.quality.kl.mean for each in expected if each.quality.kl]
    scanning = [phase for phase in sink.phases if phase.name == "nf4: scanning"]
    assert [phase.done for phase in scanning] == list(range(len(parts) + 1))
    assert {(phase.total, phase.unit) for phase in scanning} == {(len(parts), "parts")}


def test_layers_of_a_scan_are_told_by_layer_and_kind() -> None:
    rows = [
        {"part": part, "kl_mean": 0.1 * index, "perplexity": float(index)}
        for index, part in enumerate([*LAYERS, "all"])
    ]
    found = scanned_layers(rows)
    assert [(cell["layer"], cell["kind"]) for cell in found] == [
        (layer, kind) for layer in range(3) for kind in ("qkv", "output", "gate_up", "down")
    ]
    assert [(cell["kl_mean"], cell["perplexity"]) for cell in found] == [(0.1 * index, index) for index in range(12)]


def test_ranges_are_stored_of_the_model_and_of_each_variant() -> None:
    sink = Sink()
    end, rows = run(["nf4", "int8"], sink, experiment="ranges")
    assert (end.status, end.error) == ("finished", None)
    assert [(row["variant"], row["part"]) for row in rows] == [
        (variant, group) for variant in (REFERENCE, "nf4", "int8") for group in EXPECTED_ORDER
    ]
    assert {row["num_tokens"] for row in rows} == {TOKENS}
    assert wholes(rows) == []
    for method in ("nf4", "int8"):
        model, reference = pair(method)
        assert stored_ranges(rows, method) == measure_ranges(model, ids())
        assert stored_ranges(rows, REFERENCE) == measure_ranges(reference, ids())
    names = list(dict.fromkeys(phase.name for phase in sink.phases))
    for what in ("dummy:tiny", "nf4", "int8"):
        place = names.index(f"{what}: measuring weights")
        assert names[place + 1] == f"{what}: measuring activations"
        done = [phase.done for phase in sink.phases if phase.name == names[place + 1]]
        assert done == [0, 1, 2, 3]


def test_a_cancelled_measurement_keeps_what_it_has() -> None:
    cancel = threading.Event()
    sink = Sink(lambda phase: cancel.set() if phase.name.startswith("nf4: measuring activations") else None)
    end, rows = run(["nf4", "int8"], sink, experiment="ranges", cancel=cancel)
    assert (end.status, end.error) == ("cancelled", None)
    assert {row["variant"] for row in rows} == {REFERENCE}


@pytest.mark.parametrize("num_measured", [1, 3])
def test_a_cancelled_scan_keeps_the_parts_that_it_has(num_measured: int) -> None:
    cancel = threading.Event()
    sink = Sink(
        lambda phase: cancel.set() if (phase.name, phase.done) == ("int8: scanning", num_measured - 1) else None
    )
    end, rows = run(["nf4", "int8"], sink, experiment="sensitivity", cancel=cancel)
    assert (end.status, end.error) == (
        "cancelled",
        f"int8: cancelled after {num_measured} of 5 parts, which are kept",
    )
    _, (*whole, _, _) = run(["nf4", "int8"], experiment="sensitivity")
    kept = [(row["variant"], row["part"], row["kl_mean"]) for row in rows]
    assert kept == [(row["variant"], row["part"], row["kl_mean"]) for row in whole][: 5 + num_measured]
    assert len(kept) == 5 + num_measured


def test_a_scan_that_is_cancelled_before_it_has_a_part_says_nothing_of_parts() -> None:
    """Those of the variant before it are whole."""
    cancel = threading.Event()
    sink = Sink(lambda phase: cancel.set() if phase.name.startswith("int8: loading") else None)
    end, rows = run(["nf4", "int8"], sink, experiment="sensitivity", cancel=cancel)
    assert (end.status, end.error) == ("cancelled", None)
    assert [row["variant"] for row in rows] == ["nf4"] * 5


def test_a_scan_that_fails_keeps_the_parts_that_it_has() -> None:
    def fail(phase: Phase) -> None:
        if (phase.name, phase.done) == ("nf4: scanning", 2):
            raise RuntimeError("a kernel broke")

    end, rows = run(["nf4"], Sink(fail), experiment="sensitivity", by="layer")
    assert end.status == "failed"
    assert [row.get("part") for row in rows] == [*LAYERS[:2], None]
    assert rows[2]["problem"] == "RuntimeError: a kernel broke"
    stored = [{"part": None, "kl_mean": None, "perplexity": None} | row for row in rows]
    assert [(cell["layer"], cell["kind"]) for cell in scanned_layers(stored)] == [(0, "qkv"), (0, "output")]


def test_a_variant_that_fails_keeps_the_ranges_of_the_others() -> None:
    end, rows = run(["int4:group_size=48", "int8"], experiment="ranges")
    assert end.status == "failed"
    (failed,) = [row for row in rows if row["variant"] == "int4:group_size=48"]
    assert "group_size = 48" in failed["problem"]
    assert len(stored_ranges(rows, "int8")) == len(stored_ranges(rows, REFERENCE)) == 3 * (4 + 4 + 2 + 1)


def test_how_a_scan_cuts_the_model_is_part_of_its_config() -> None:
    assert QuantizationLabConfig().by == "kind"
    config = QuantizationLabConfig.from_dict({"experiment": "sensitivity", "by": "layer"})
    assert QuantizationLabConfig.from_dict(config.to_dict()) == config
    older = {name: value for name, value in QuantizationLabConfig().to_dict().items() if name != "by"}
    assert QuantizationLabConfig.from_dict(older) == QuantizationLabConfig()
    with pytest.raises(ConfigError, match="by"):
        QuantizationLabConfig.from_dict({"by": "head"})


# What stored ranges say


def reaching(group: str, layer: int, part: str, max_abs: float, p999: float) -> Range:
    return Range(group, layer, part, max_abs=max_abs, p999=p999, kurtosis=3.0, outlier={"input": 1})


def test_ranges_by_how_far_the_largest_is_beyond_the_rest() -> None:
    ranges = [
        reaching(ACTIVATIONS, 0, "qkv", 8.0, 2.0),
        reaching(ACTIVATIONS, 0, "down", 90.0, 3.0),
        reaching(ACTIVATIONS, 1, "down", 5.0, 0.0),
        reaching(KV, 1, "keys", 20.0, 2.0),
        reaching(ACTIVATIONS, 1, "qkv", 6.0, 6.0),
    ]
    assert [tail(each) for each in ranges] == [4, 30, None, 10, 1]
    assert [(each.layer, each.part) for each in by_tail(ranges)] == [(0, "down"), (1, "keys"), (0, "qkv"), (1, "qkv")]
    assert [each.max_abs for each in furthest(ranges, ACTIVATIONS)] == [90, 6]
    assert [each.max_abs for each in furthest(ranges, KV)] == [20]
    assert furthest(ranges, "weights") == []
    rows = [{"variant": "int8", "part": ACTIVATIONS, "layers": [asdict(ranges[0])]}]
    assert stored_ranges(rows, "int8") == ranges[:1]
    assert stored_ranges(rows, "nf4") == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("p999", [0.0, 0.003, 0.4, 3.0, 7.9, 8.0])
def test_codes_left_are_those_that_the_rest_is_rounded_to(bits: int, p999: float) -> None:
    """Of a grid that holds 8.0, by rounding values up to the percentile."""
    step = 8.0 / (2 ** (bits - 1) - 1)
    codes = np.unique(np.round(np.linspace(-p999, p999, 20001) / step))
    assert codes_left(reaching(ACTIVATIONS, 0, "down", 8.0, p999), bits) == len(codes)


def test_nothing_but_zeros_leaves_no_answer() -> None:
    assert codes_left(reaching(ACTIVATIONS, 0, "down", 0.0, 0.0)) is None
