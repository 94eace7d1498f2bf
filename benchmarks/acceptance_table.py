"""Results of `benchmarks/speculation_acceptance.py` as a table for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import stored
from benchmarks.grid import NONE, markdown_lines

# Tokens of a round over all categories, at least, by a head's kind: for chains, and for trees.
MIN_LENGTHS: Mapping[str, float] = {"eagle": 2.2}
MIN_TREE_LENGTHS: Mapping[str, float] = {"eagle": 2.5, "medusa": 1.8}

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    return stored.load_results("speculation_acceptance", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading, a table, and what falls short, for each head of each result; empty without any."""
    return "\n\n".join(_markdown(result, name, head) for result in results for name, head in result["heads"].items())


def drafts_of(head: Mapping[str, Any]) -> str:
    """In words, of a result of any age."""
    num_nodes, length = head.get("num_nodes"), head["num_speculative_tokens"]
    return f"trees of {num_nodes}, {length} deep" if num_nodes else f"chains of {length}"


def _markdown(result: Result, name: str, head: Mapping[str, Any]) -> str:
    device = result["environment"]["gpu"] or result["environment"]["cpu"]
    rows = [("category", "rounds", "tokens of a round", "without loops", "accepted by position")]
    for category, of in head["by_category"].items():
        whole = of["whole"]
        shares = (
            " ".join(NONE if share is None else f"{share:.2f}" for share in whole["by_position"]) if whole else NONE
        )
        rounds = f"{whole['num_rounds']:,}" if whole else "0"
        rows.append((category, rounds, _length(whole), _length(of["no_loops"]), shares))
    options = result["options"]
    lines = [
        f"**Head {name} ({head['kind']}, {drafts_of(head)}) on {result['num_questions']} first turns "
        f"of Spec-Bench, {options['output_len']} greedy tokens of {result['model']}, {device}, {result['date']}**",
        "",
        *markdown_lines(rows),
    ]
    aims = MIN_TREE_LENGTHS if head.get("num_nodes") else MIN_LENGTHS
    least, found = aims.get(head["kind"]), head["by_category"].get("all", {}).get("whole")
    if least is not None and found is not None and found["mean_length"] < least:
        lines += ["", f"Short of what it aims at: {found['mean_length']:.2f} tokens of a round instead of {least:.2f}."]
    return "\n".join(lines)


def _length(summary: Mapping[str, Any] | None) -> str:
    return NONE if summary is None else f"{summary['mean_length']:.2f}"
