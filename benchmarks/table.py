"""Results of `benchmarks/engine.py` as a table: as text, and as the README's section between its markers.

python -m benchmarks.table     # writes the tables of README.md anew from benchmarks/results/*.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import aims, quality_table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- engine benchmark: begin -->", "<!-- engine benchmark: end -->"
NO_RESULTS = "No result of a card is stored."
HEADER = ("figure", "median", "min..max", "of the peer", "of the limit", "not recorded", "step")

Result = Mapping[str, Any]


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The stored results of the engine's benchmark, by file name."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [document for document in documents if document.get("benchmark") == "engine"]


def markdown(results: Iterable[Result]) -> str:
    """A heading and a table for each result."""
    return "\n\n".join(_markdown(result) for result in results) or NO_RESULTS


def text_table(result: Result) -> str:
    """The same for a terminal, with the reason where a figure is missing."""
    lines = [_machine(result)]
    for model, figures in _by_model(result).items():
        rows = [HEADER, *(_cells(figure) for figure in figures)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines += ["", model]
        for row, figure in zip(rows, [None, *figures], strict=True):
            cells = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in _columns(row, widths)
            )
            reason = f"  {figure['error']}" if figure and figure["error"] else ""
            lines.append("  ".join(cells).rstrip() + reason)
    return "\n".join(lines)


def replace_between_markers(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what lies between the markers replaced. Raises `ValueError` unless each is there once, in order."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or begin in after or end in before + after:
        raise ValueError(f"the text needs one {begin} and one {end} after it")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main() -> None:
    text = replace_between_markers(README.read_text(encoding="utf-8"), markdown(load_results()))
    quality = quality_table.markdown(quality_table.load_results(RESULTS))
    text = replace_between_markers(text, quality, quality_table.BEGIN, quality_table.END)
    README.write_text(text, encoding="utf-8")


def _columns(row: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))


def _markdown(result: Result) -> str:
    lines = [f"**{_machine(result)}**"]
    for model, figures in _by_model(result).items():
        lines += [
            "",
            f"| {model}: {HEADER[0]} | {' | '.join(HEADER[1:])} |",
            "|---" + "|---:" * (len(HEADER) - 1) + "|",
        ]
        lines += [f"| {' | '.join(_cells(figure))} |" for figure in figures]
    if missed := aims.missed(result["figures"]):
        lines += ["", f"Short of what it aims at: {'; '.join(missed)}."]
    return "\n".join(lines)


def _machine(result: Result) -> str:
    versions = result["environment"]["versions"]
    limits = result["limits"]
    parts = [
        result["card"] or result["environment"]["cpu"] or "CPU",
        f"driver {result['driver']}" if result["driver"] else None,
        f"torch {versions['torch']}",
        f"triton {versions['triton']}" if versions["triton"] else None,
        result["date"],
        f"commit {result['commit'][:7]}" if result["commit"] else None,
        f"copies {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s",
        f"multiplies {limits['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s",
    ]
    return ", ".join(part for part in parts if part)


def _by_model(result: Result) -> dict[str, list[Mapping[str, Any]]]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for figure in result["figures"]:
        grouped.setdefault(figure["model"], []).append(figure)
    return grouped


def _cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    unit, step_us = figure["unit"], figure["details"].get("step_us")
    several = len(figure["samples"] or ()) > 1
    return (
        figure["name"],
        _value(figure["median"], unit),
        f"{_number(figure['min'], unit)}..{_number(figure['max'], unit)}" if several else "–",
        f"{figure['ratio']:.2f} × {figure['peer_name']}" if figure["ratio"] is not None else "–",
        f"{figure['share']:.0%} {figure['limit']}" if figure["share"] is not None else "–",
        _value(figure["not_recorded"] and figure["not_recorded"]["median"], unit),
        f"{step_us:,.0f} us" if step_us is not None else "–",
    )


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return _number(value, unit) if unit == "share" else f"{_number(value, unit)} {unit}"


def _number(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


if __name__ == "__main__":
    main()
