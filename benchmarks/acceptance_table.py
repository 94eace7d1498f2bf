"""Results of `benchmarks/speculation_acceptance.py` as a table for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import aims, stored
from benchmarks.grid import NONE, markdown_lines

SIMULATED = (
    "Counted by simulation over the target's own greedy answers; a step without a draft is a round of one token."
)

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    return stored.load_results("speculation_acceptance", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading, a table, and what falls short, for each head and proposer of each result; empty without any."""
    return "\n\n".join(_markdown(result, name, one) for result in results for name, one in measured_of(result).items())


def measured_of(result: Result) -> dict[str, Mapping[str, Any]]:
    """Heads, then what drafts without one, of a result of any age."""
    return {**result["heads"], **result.get("proposers", {})}


def drafts_of(one: Mapping[str, Any]) -> str:
    """In words, of a result of any age."""
    num_nodes, length = one.get("num_nodes"), one["num_speculative_tokens"]
    return f"trees of {num_nodes}, {length} deep" if num_nodes else f"chains of {length}"


def _markdown(result: Result, name: str, one: Mapping[str, Any]) -> str:
    device = result["environment"]["gpu"] or result["environment"]["cpu"]
    is_ngram = one["kind"] == "ngram"
    header = ("category", "rounds", "tokens of a round", "without loops", "accepted by position")
    rows: list[tuple[str, ...]] = [(*header, "rounds with a draft") if is_ngram else header]
    for category, of in one["by_category"].items():
        whole = of["whole"]
        shares = (
            " ".join(NONE if share is None else f"{share:.2f}" for share in whole["by_position"]) if whole else NONE
        )
        rounds = f"{whole['num_rounds']:,}" if whole else "0"
        rows.append((category, rounds, _length(whole), _length(of["no_loops"]), shares))
        if is_ngram:
            share = of["share_drafted"]
            rows[-1] += (NONE if share is None else f"{share:.0%}",)
    options = result["options"]
    what = f"N-grams of {one['ngram_min']} to {one['ngram_max']} tokens" if is_ngram else f"Head {name}"
    kind = "" if is_ngram else f"{one['kind']}, "
    lines = [
        f"**{what} ({kind}{drafts_of(one)}) on {result['num_questions']} first turns "
        f"of Spec-Bench, {options['output_len']} greedy tokens of {result['model']}, {device}, {result['date']}**",
        "",
        *markdown_lines(rows),
    ]
    if is_ngram:
        lines += ["", SIMULATED]
    if missed := aims.missed_acceptance(one):
        lines += ["", f"Short of what it aims at: {'; '.join(missed)}."]
    return "\n".join(lines)


def _length(summary: Mapping[str, Any] | None) -> str:
    return NONE if summary is None else f"{summary['mean_length']:.2f}"
