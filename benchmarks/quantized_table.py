"""Results of `benchmarks/quantized_gpu.py` as a table, for a terminal and for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from backend.experiments.quantization_config import REFERENCE, variant_name
from benchmarks import aims, stored
from benchmarks.grid import NONE, markdown_lines, text_lines
from benchmarks.heading import machine_line

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    return stored.load_results("quantized_gpu", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading, a table, and what falls short, for each result; empty without any."""
    return "\n\n".join(_markdown(result) for result in results)


def text_table(result: Result) -> str:
    """The same for a terminal, with the reason where a row is empty."""
    remarks = [row.get("error") or _first_error(row) for row in result["results"]]
    return "\n".join([machine_line(result), "", *text_lines(_rows(result), remarks), "", *_closing(result)]).rstrip()


def _markdown(result: Result) -> str:
    lines = [f"**{machine_line(result)}**", "", *markdown_lines(_rows(result))]
    for line in _closing(result):
        lines += ["", line]
    return "\n".join(lines)


def _rows(result: Result) -> list[tuple[str, ...]]:
    options = result["options"]
    names = [f"decode {number}" for number in options["decode_batches"]]
    names += [f"prefill {number}x{length}" for number, length in options["prefill"]]
    header = (f"{result['model']}: weights", "layers and head", *(f"{name}, tok/s" for name in names), "on the card")
    return [header, *(_cells(row, names) for row in result["results"])]


def _cells(row: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    name = row.get("dtype", "as it is") if row["variant"] == REFERENCE else variant_name(row["variant"])
    if "weights_bytes" not in row:
        return (name, NONE, *(NONE for _ in names), NONE)
    figures = {figure["name"]: figure for figure in row["figures"]}
    held = row["device_weights_bytes"]
    return (
        name,
        f"{row['floor_bytes'] / 1e9:,.2f} GB",
        *("emulated" if row["emulated_quantization"] else _speed(figures.get(figure)) for figure in names),
        NONE if held is None else f"{held / row['weights_bytes']:.3f} of {row['weights_bytes'] / 1e9:,.2f} GB",
    )


def _speed(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["median"] is None:
        return NONE
    parts = [f"{figure['median']:,.0f}"]
    if figure["ratio"] is not None:
        parts.append(f"{figure['ratio']:.2f} ×")
    if figure["share"] is not None:
        parts.append(f"{figure['share']:.0%}")
    return ", ".join(parts)


def _closing(result: Result) -> list[str]:
    """What the cells are, the peer's figures, and what falls short."""
    lines = [
        "Of each speed: times the unquantized model's of the same call; of decoding, the share of the limit that copying sets to "
        "reading layers and head once. On the card: what torch says the weights take, of the bytes reported."
    ]
    over_peer = [(row, figure) for row in result["results"] for figure in row.get("over_peer", ())]
    if over_peer:
        told = (
            f"{variant_name(row['variant'])} {figure['name']} {figure['ratio']:.2f} × ({figure['median']:,.0f} against "
            f"{figure['peer']:,.0f} tok/s{_shares(figure)})"
            for row, figure in over_peer
        )
        lines.append(f"Beside {result['peer']}: {'; '.join(told)}.")
    if missed := aims.missed_quantized(result):
        lines.append(f"Short of what it aims at: {'; '.join(missed)}.")
    return lines


def _shares(figure: Mapping[str, Any]) -> str:
    return f", {figure['share']:.0%} and {figure['peer_share']:.0%} of the limit" if figure["share"] is not None else ""


def _first_error(row: Mapping[str, Any]) -> str:
    return next((figure["error"] for figure in row["figures"] if figure["error"]), "")
