"""Results of `benchmarks/engine.py` as a table: as text, and with those of other benchmarks of a card as the README's section.

python -m benchmarks.table     # writes the tables of README.md anew from benchmarks/results/*.json
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import (
    acceptance_table,
    aims,
    certificate_table,
    quality_table,
    quantized_table,
    recording_table,
    speculation_table,
    stored,
)
from benchmarks.figures import peer_share
from benchmarks.grid import markdown_lines, text_lines
from benchmarks.heading import machine_line

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- engine benchmark: begin -->", "<!-- engine benchmark: end -->"
NO_RESULTS = "No result of a card is stored."
HEADER = ("figure", "median", "min..max", "of the peer", "of the limit", "the peer's", "not recorded", "step")

Result = Mapping[str, Any]


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The stored results of the engine's benchmark, by file name."""
    return stored.load_results("engine", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading and a table for each result."""
    return "\n\n".join(_markdown(result) for result in results) or NO_RESULTS


def performance(folder: Path = RESULTS) -> str:
    """The README's section: all stored results, benchmark by benchmark."""
    others = (
        quantized_table.markdown(quantized_table.load_results(folder)),
        acceptance_table.markdown(acceptance_table.load_results(folder)),
        speculation_table.markdown(speculation_table.load_results(folder)),
        certificate_table.markdown(certificate_table.load_results(folder)),
        recording_table.markdown(recording_table.load_results(folder)),
    )
    return "\n\n".join([markdown(load_results(folder)), *filter(None, others)])


def text_table(result: Result) -> str:
    """The same for a terminal, with the reason where a figure is missing."""
    lines = [machine_line(result)]
    for model, figures in _by_model(result).items():
        rows = [HEADER, *(_cells(figure) for figure in figures)]
        lines += ["", model, *text_lines(rows, [figure["error"] or "" for figure in figures])]
    return "\n".join(lines)


def replace_between_markers(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what lies between the markers replaced. Raises `ValueError` unless each is there once, in order."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or begin in after or end in before + after:
        raise ValueError(f"the text needs one {begin} and one {end} after it")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main() -> None:
    text = replace_between_markers(README.read_text(encoding="utf-8"), performance())
    quality = quality_table.markdown(quality_table.load_results(RESULTS))
    text = replace_between_markers(text, quality, quality_table.BEGIN, quality_table.END)
    README.write_text(text, encoding="utf-8")


def _markdown(result: Result) -> str:
    lines = [f"**{machine_line(result)}**"]
    for model, figures in _by_model(result).items():
        header = (f"{model}: {HEADER[0]}", *HEADER[1:])
        lines += ["", *markdown_lines([header, *(_cells(figure) for figure in figures)])]
    if missed := aims.missed(result["figures"]):
        lines += ["", f"Short of what it aims at: {'; '.join(missed)}."]
    return "\n".join(lines)


def _by_model(result: Result) -> dict[str, list[Mapping[str, Any]]]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for figure in result["figures"]:
        grouped.setdefault(figure["model"], []).append(figure)
    return grouped


def _cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    unit, step_us = figure["unit"], figure["details"].get("step_us")
    several = len(figure["samples"] or ()) > 1
    theirs = peer_share(figure["share"], figure["ratio"])  # older results do not store it
    return (
        figure["name"],
        _value(figure["median"], unit),
        f"{_number(figure['min'], unit)}..{_number(figure['max'], unit)}" if several else "–",
        f"{figure['ratio']:.2f} × {figure['peer_name']}" if figure["ratio"] is not None else "–",
        f"{figure['share']:.0%} {figure['limit']}" if figure["share"] is not None else "–",
        f"{theirs:.0%}" if theirs is not None else "–",
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
