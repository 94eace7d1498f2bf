"""Results of `benchmarks/speculation_speed.py` as tables, for a terminal and for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import aims, stored
from benchmarks.grid import NONE, markdown_lines, text_lines
from benchmarks.heading import machine_line

HEADER = (
    "requests",
    "tok/s of a request",
    "speedup",
    "tokens of a round",
    "draft",
    "verify",
    "plain step",
    "predicted",
    "of predicted",
    "all output",
    "verifying whole drafts",
)
FROM_TEXTS = "summarization + rag"  # both together, beside each of them
OLDER_NAMES = {"copy-heavy": FROM_TEXTS}  # of categories, in stored results

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    return stored.load_results("speculation_speed", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading, two tables, and what falls short, for each result; empty without any."""
    return "\n\n".join(_markdown(result) for result in results)


def text_table(result: Result) -> str:
    """The same for a terminal, with the reason where a row is empty."""
    lines = [machine_line(result), ""]
    lines += text_lines(_rows(result), [row.get("error", "") for row in result["results"]])
    lines += ["", *text_lines(_categories(result))]
    return "\n".join([*lines, "", *_missed(result)]).rstrip()


def _markdown(result: Result) -> str:
    lines = [f"**{machine_line(result)}**", "", *markdown_lines(_rows(result))]
    lines += ["", *markdown_lines(_categories(result))]
    for line in _missed(result):
        lines += ["", line]
    return "\n".join(lines)


def _rows(result: Result) -> list[tuple[str, ...]]:
    settings = "".join(f", {setting}" for setting in result["options"].get("set", ()))
    if temperature := result["options"].get("temperature"):
        settings = f", sampled at temperature {temperature:g}{settings}"
    what = f"{result['model']}, {result['num_questions']} {result['questions']}{settings}: proposer"
    return [(what, *HEADER), *(_cells(row) for row in result["results"])]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate, whole = row.get("request_tok_s"), row.get("whole_drafts")
    return (
        row["method"],
        str(row["requests"]),
        f"{rate['median']:,.0f}" if rate else NONE,
        _number(row, "speedup", "{:.2f} ×"),
        _number(row, "mean_acceptance_length", "{:.2f}"),
        *(_number(row, name, "{:.3f} ms") for name in ("draft_ms", "verify_ms", "plain_ms")),
        _number(row, "predicted", "{:.2f} ×"),
        _number(row, "of_predicted", "{:.0%}"),
        _number(row, "output_ratio", "{:.2f} ×"),
        f"{whole['num_tokens']} tokens, {whole['verify_cost']:.2f} plain steps" if whole else NONE,
    )


def _categories(result: Result) -> list[tuple[str, ...]]:
    """Speedup and tokens of a round by category, of the smallest number of requests at a time."""
    fewest = min(row["requests"] for row in result["results"])
    rows = [row for row in result["results"] if row["requests"] == fewest and "by_category" in row]
    names: list[str] = list(rows[0]["by_category"]) if rows else []
    cells = (
        (
            row["method"],
            *(
                f"{_number(row['by_category'][name], 'speedup', '{:.2f} ×')} "
                f"({_number(row['by_category'][name], 'mean_acceptance_length', '{:.2f}')})"
                for name in names
            ),
        )
        for row in rows
    )
    shown: list[str] = [OLDER_NAMES.get(name, name) for name in names]
    return [(f"requests at a time: {fewest}; speedup (tokens of a round)", *shown), *cells]


def _missed(result: Result) -> list[str]:
    missed = aims.missed_speculation(result)
    return [f"Short of what it aims at: {'; '.join(missed)}."] if missed else []


def _number(row: Mapping[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return NONE if value is None else form.format(value)
