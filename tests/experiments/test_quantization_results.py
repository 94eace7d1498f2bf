"""What the matrix says of stored results: differences, the best of a column, reasons; and what nothing beats."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backend.experiments.quantization_results import (
    EMULATED,
    MEASURES,
    columns,
    frontier,
    layer_cells,
    matrix,
    outliers,
)


def row(variant: str, **figures: Any) -> dict[str, Any]:
    names = (*MEASURES, "part", "problem", "emulated", "layers", "delta_p_standard_error")
    return dict.fromkeys(names) | {"variant": variant} | figures


REFERENCE = row(
    "reference", perplexity=20.0, weights_bytes=400, decode_1_tok_s=10.0, emulated=False, kv_bytes_per_token=8
)
INT8 = row(
    "int8", perplexity=21.0, weights_bytes=100, decode_1_tok_s=15.0, kl_mean=0.1, emulated=False, kv_bytes_per_token=8
)
NF4 = row("nf4", perplexity=25.0, weights_bytes=50, kl_mean=0.3, emulated=True, kv_bytes_per_token=8)
FAILED = row("gptq", problem="no files")


def cells(results: list[dict[str, Any]], others: list[dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    names = columns(results)
    return {line.variant: dict(zip(names, line.cells, strict=True)) for line in matrix(results, others)}


def test_differences_are_from_the_reference() -> None:
    found = cells([REFERENCE, INT8, NF4, FAILED])
    assert found["int8"]["weights_bytes"].difference == -0.75
    assert found["int8"]["perplexity"].difference == pytest.approx(0.05)
    assert found["int8"]["decode_1_tok_s"].difference == pytest.approx(0.5)
    assert all(cell.difference is None for cell in found["reference"].values())
    assert found["int8"]["kl_mean"].difference is None, "it is a difference itself"


def test_differences_are_from_the_same_variant_of_another_run() -> None:
    found = cells([REFERENCE, INT8, NF4], [REFERENCE, row("int8", perplexity=42.0, kl_mean=0.05)])
    assert found["int8"]["perplexity"].difference == -0.5
    assert found["int8"]["kl_mean"].difference == 1.0
    assert found["reference"]["perplexity"].difference == 0.0
    assert found["nf4"]["perplexity"].difference is None


def test_the_best_is_the_variants_own() -> None:
    """The reference has the lowest perplexity, and is no variant; a column of one value has no best."""
    found = cells([REFERENCE, INT8, NF4, FAILED])
    best = {(variant, name) for variant, line in found.items() for name, cell in line.items() if cell.is_best}
    assert best == {("int8", "perplexity"), ("int8", "kl_mean"), ("nf4", "weights_bytes")}
    cached = [row("none:kv=int8", weights_bytes=400), row("larger", weights_bytes=500)]
    found = cells([REFERENCE, *cached])
    assert [found[variant]["weights_bytes"].is_best for variant in ("reference", "none:kv=int8")] == [False, True]


def test_what_is_missing_has_its_reason() -> None:
    found = cells([REFERENCE, INT8, NF4, FAILED])
    assert found["nf4"]["decode_1_tok_s"].reason == EMULATED
    assert found["gptq"]["perplexity"].reason == "no files"
    assert found["reference"]["kl_mean"].reason == "The reference does not differ from itself"
    assert cells([REFERENCE, row("fp8", emulated=False)])["fp8"]["decode_1_tok_s"].reason == "Not measured in this run"
    assert found["int8"]["perplexity"].reason is None


def test_memory_that_was_not_seen_has_its_reason() -> None:
    seen = INT8 | {"peak_memory_bytes": 500}
    untold = row("none:kv=int8", emulated=False, decode_1_tok_s=9.0)
    untimed = row("fp8", emulated=False)
    found = cells([REFERENCE, seen, NF4, untold, untimed])
    reasons = {variant: line["peak_memory_bytes"].reason for variant, line in found.items()}
    assert reasons["int8"] is None
    assert "its products are emulated" in str(reasons["nf4"])
    assert reasons["none:kv=int8"] == "The system does not tell how much this process held"
    assert reasons["fp8"] == "Not measured in this run"


def test_columns_without_a_figure_are_left_out_and_speeds_are_not_where_they_are_emulated() -> None:
    assert "peak_memory_bytes" not in columns([REFERENCE, INT8])
    assert "decode_1_tok_s" in columns([NF4])
    assert "decode_1_tok_s" not in columns([row("fp8", emulated=False)])
    assert "kv_bytes_per_token" not in columns([REFERENCE, INT8])
    assert "kv_bytes_per_token" in columns([REFERENCE, row("none:kv=int8", kv_bytes_per_token=4)])


def test_parts_of_a_scan_are_no_variants() -> None:
    assert [line.variant for line in matrix([REFERENCE, INT8 | {"part": "qkv"}])] == ["reference"]


@pytest.mark.parametrize(("x", "sign"), [("weights_bytes", 1), ("decode_1_tok_s", -1)])
def test_the_frontier_is_what_nothing_beats_in_both(x: str, sign: int) -> None:
    """By its definition, on random points with ties."""
    draw = random.Random(0)
    for _ in range(50):
        rows = [row(str(index), **{x: draw.randint(1, 6), "kl_mean": draw.randint(1, 6)}) for index in range(8)]
        kept = {each["variant"] for each in frontier(rows, x, "kl_mean")}
        for one in rows:
            beaten = any(
                sign * other[x] <= sign * one[x]
                and other["kl_mean"] <= one["kl_mean"]
                and (other[x], other["kl_mean"]) != (one[x], one["kl_mean"])
                for other in rows
            )
            assert (one["variant"] in kept) == (not beaten)
    assert frontier([row("without", kl_mean=0.1)], x, "kl_mean") == []


def test_layers_and_the_channels_that_stand_out() -> None:
    def layer(index: int, kind: str, ratio: float | None) -> dict[str, Any]:
        return {
            "layer": index,
            "kind": kind,
            "output_error": 0.1 * index,
            "weight_error": 0.1,
            "largest_channels": [{"channel": 5, "ratio": ratio}, {"channel": 6, "ratio": 1.0}],
        }

    partly = INT8 | {"layers": [layer(0, "qkv", 3.0)]}
    whole = NF4 | {"layers": [layer(0, "qkv", 3.0), layer(1, "down", 90.0), layer(2, "down", None)]}
    found = [(each.layer, each.kind, each.channel, each.ratio) for each in outliers([REFERENCE, partly, whole])]
    assert found == [(1, "down", 5, 90.0), (0, "qkv", 5, 3.0)]
    assert [(cell["variant"], cell["layer"], cell["output_error"]) for cell in layer_cells([partly, whole])] == [
        ("int8", 0, 0.0),
        ("nf4", 0, 0.0),
        ("nf4", 1, 0.1),
        ("nf4", 2, 0.2),
    ]
    assert outliers([REFERENCE]) == layer_cells([REFERENCE]) == []
