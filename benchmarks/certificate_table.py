"""Results of `benchmarks/certificates.py` as tables, for a terminal and for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import stored
from benchmarks.grid import NONE, markdown_lines, text_lines
from benchmarks.heading import machine_line

HEADER = (
    "verdict",
    "greedy tokens checked",
    "of rounds",
    "accepted",
    "excused",
    "samples by each",
    "p of χ²",
    "total variation (limit)",
    "seconds",
)

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    return stored.load_results("certificates", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading, a table, and what speaks against a method or was not tested, for each result; empty without any."""
    return "\n\n".join(
        "\n".join([f"**{machine_line(result)}**", "", *markdown_lines(_rows(result)), *_remarks(result)])
        for result in results
    )


def text_table(result: Result) -> str:
    """The same for a terminal."""
    return "\n".join([machine_line(result), "", *text_lines(_rows(result)), *_remarks(result)])


def _rows(result: Result) -> list[tuple[str, ...]]:
    settings = "".join(f", {setting}" for setting in result["options"]["set"])
    return [(f"Certificates of {result['model']}{settings}", *HEADER), *(_cells(row) for row in result["results"])]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = f"{row['seconds']:,.0f}"
    if "verdict" not in row:
        return (row["method"], *[NONE] * (len(HEADER) - 1), seconds)
    greedy, sampled = row["greedy"], row["sampled"]
    return (
        row["method"],
        row["verdict"],
        f"{greedy['num_checked']:,} of {greedy['num_tokens']:,}",
        f"{sum(greedy['from_rounds'].values()):,}",
        f"{greedy['from_rounds']['accepted']:,}",
        _excused(greedy),
        f"{sampled['num_samples']:,}",
        f"{sampled['p_value']:.2g}",
        f"{sampled['total_variation']:.3f} ({sampled['total_variation_limit']:.3f})",
        seconds,
    )


def _excused(greedy: Mapping[str, Any]) -> str:
    """How many greedy tokens differ and are excused, and by how much the logits of the worst one miss the best."""
    bound, gaps = greedy["logit_gap_bound"], [each["logit_gap"] for each in greedy["excused"]]
    if bound is None:
        return "none may be"
    return f"{len(gaps)}, up to {max(gaps):.2g} of {bound:g}" if gaps else "0"


def _remarks(result: Result) -> list[str]:
    lines = []
    for row in result["results"]:
        if reasons := [row["error"]] if "error" in row else row["reasons"]:
            lines += ["", f"{row['method']}: {'; '.join(reasons)}."]
    return lines
