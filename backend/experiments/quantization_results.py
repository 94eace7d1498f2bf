"""What the stored results of a quantization run say: figures beside those of the reference, and which nothing beats. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backend.experiments.layer_error import ALL, layer_and_kind
from backend.experiments.quantization_config import REFERENCE

Row = Mapping[str, Any]
Better = Literal["lower", "higher"]

PEAK = "peak_memory_bytes"
# Columns of the matrix, and which way is better; delta p has its best at 0, and is not ranked.
MEASURES: dict[str, Better | None] = {
    "bits_per_weight": "lower",
    "weights_bytes": "lower",
    "kv_bytes_per_token": "lower",
    "perplexity": "lower",
    "kl_mean": "lower",
    "top1_agreement": "higher",
    "delta_p": None,
    "decode_1_tok_s": "higher",
    "decode_32_tok_s": "higher",
    "prefill_tok_s": "higher",
    PEAK: "lower",
}
SPEEDS = ("decode_1_tok_s", "decode_32_tok_s", "prefill_tok_s")
EMULATED = (
    "Emulated: the products are computed by a plain reference, as no kernel for this storage runs here, and its speed says "
    "nothing about the method"
)

_WITHOUT_DIFFERENCE = ("kl_mean", "delta_p", "top1_agreement")  # they are differences from the reference themselves


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of a variant.

    Attributes:
        difference: (value - base) / base; None where there is no base, or the figure is a difference itself.
        is_best: of the variants, where they differ.
        reason: why there is no value; None where there is one.
    """

    value: float | None
    difference: float | None = None
    is_best: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """`problem` says why a variant has no figures; `cells` are in the order of the columns."""

    variant: str
    cells: tuple[Cell, ...]
    problem: str | None
    row: Row


@dataclass(frozen=True, slots=True)
class Outlier:
    """An input channel of a layer, `ratio` times as large as the median one."""

    layer: int
    kind: str
    channel: int
    ratio: float


def wholes(results: Sequence[Row]) -> list[Row]:
    """Of whole variants, without the parts of a sensitivity scan."""
    return [row for row in results if row["part"] is None]


def columns(results: Sequence[Row]) -> list[str]:
    """Measures that some row has a figure for, in the matrix's order; speeds too where all are emulated.

    The KV cache is among them where its dtype is not the same in all.
    """
    is_emulated = any(row["emulated"] for row in results)
    values = {name: {row[name] for row in results} - {None} for name in MEASURES}
    return [
        name
        for name in MEASURES
        if len(values[name]) > (name == "kv_bytes_per_token") or (is_emulated and name in SPEEDS[:2])
    ]


def matrix(results: Sequence[Row], others: Sequence[Row] | None = None) -> list[MatrixRow]:
    """A row for each variant, the reference first.

    Args:
        others: of another run: differences are from the same variant there, instead of from the reference.
    """
    rows, names = wholes(results), columns(wholes(results))
    best = {name: _best(rows, name) for name in names}
    bases = None if others is None else {row["variant"]: row for row in wholes(others)}
    reference = next((row for row in rows if row["variant"] == REFERENCE), None)
    found = []
    for row in rows:
        base = reference if bases is None else bases.get(row["variant"])
        is_itself = bases is None and row["variant"] == REFERENCE
        cells = tuple(
            Cell(
                value=row[name],
                difference=None if is_itself else _difference(row, base, name, bases is not None),
                is_best=row["variant"] != REFERENCE and row[name] is not None and row[name] == best[name],
                reason=_reason(row, name) if row[name] is None else None,
            )
            for name in names
        )
        found.append(MatrixRow(row["variant"], cells, row["problem"], row))
    return found


def frontier(rows: Sequence[Row], x: str, y: str) -> list[Row]:
    """Those rows that no other beats in one of two measures without losing in the other, by ascending x."""
    known = [row for row in rows if row[x] is not None and row[y] is not None]
    signs = [1 if MEASURES[name] == "lower" else -1 for name in (x, y)]

    def beats(one: Row, other: Row) -> bool:
        pairs = [(sign * one[name], sign * other[name]) for sign, name in zip(signs, (x, y), strict=True)]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    kept = [row for row in known if not any(beats(other, row) for other in known)]
    return sorted(kept, key=lambda row: row[x])


def layer_cells(results: Sequence[Row]) -> list[dict[str, Any]]:
    """The error of each layer's output in each variant that has them."""
    return [
        {"variant": row["variant"], **{name: layer[name] for name in ("layer", "kind", "output_error", "weight_error")}}
        for row in wholes(results)
        for layer in row["layers"] or ()
    ]


def outliers(results: Sequence[Row], most: int = 8) -> list[Outlier]:
    """The largest input channels, descending, one for each layer and kind. They are the reference's, in every variant."""
    layers = max((row["layers"] or () for row in wholes(results)), key=len, default=())
    found = [
        Outlier(layer["layer"], layer["kind"], channel["channel"], channel["ratio"])
        for layer in layers
        for channel in layer["largest_channels"][:1]
        if channel["ratio"] is not None
    ]
    return sorted(found, key=lambda outlier: -outlier.ratio)[:most]


def scanned_layers(results: Sequence[Row]) -> list[dict[str, Any]]:
    """What each linear layer costs alone, of the rows of a scan by layer: `layer`, `kind`, `kl_mean` and `perplexity`.

    A scan that was ended has some of them; one that failed has a row without a part.
    """
    found = []
    for row in results:
        if row["part"] not in (None, ALL):
            layer, kind = layer_and_kind(row["part"])
            found.append({"layer": layer, "kind": kind} | {name: row[name] for name in ("kl_mean", "perplexity")})
    return found


def _best(rows: Sequence[Row], name: str) -> float | None:
    better = MEASURES[name]
    values = [row[name] for row in rows if row["variant"] != REFERENCE and row[name] is not None]
    if better is None or len(set(values)) < 2:
        return None
    return min(values) if better == "lower" else max(values)


def _difference(row: Row, base: Row | None, name: str, of_runs: bool) -> float | None:
    if base is None or row[name] is None or not base[name] or (name in _WITHOUT_DIFFERENCE and not of_runs):
        return None
    return (row[name] - base[name]) / abs(base[name])


def _reason(row: Row, name: str) -> str | None:
    if row["problem"]:
        return row["problem"]
    if name in SPEEDS:
        return EMULATED if row["emulated"] else "Not measured in this run"
    if name == PEAK:
        if row["emulated"]:
            return "Taken while speeds are measured; this variant has none, as its products are emulated"
        is_timed = any(row[speed] is not None for speed in SPEEDS)
        return "The system does not tell how much this process held" if is_timed else "Not measured in this run"
    if row["variant"] == REFERENCE and name in _WITHOUT_DIFFERENCE:
        return "The reference does not differ from itself"
    return None
