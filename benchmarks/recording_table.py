"""Results of `benchmarks/recording.py` as tables, for a terminal and for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import aims, stored
from benchmarks.grid import NONE, markdown_lines, text_lines

# Variants of a run.
RECORDED, NOT_RECORDED = "recorded", "not recorded"
WITHOUT_LEDGER, WITHOUT_SPECULATION = "without the ledger", "without the ledger of speculation"

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    """Older ones, which name no benchmark, are none of them."""
    return stored.load_results("recording", folder)


def markdown(results: Iterable[Result]) -> str:
    """A heading, a table, and what falls short, for each result; empty without any."""
    return "\n\n".join(
        "\n".join([f"**{_title(result)}**", "", *markdown_lines(_rows(result)), *_missed(result)]) for result in results
    )


def text_table(result: Result) -> str:
    """The same for a terminal."""
    return "\n".join([_title(result), "", *text_lines(_rows(result)), *_missed(result)])


def _title(result: Result) -> str:
    machine = result["environment"]
    what = f"{result['requests']} requests of {result['output_len']} tokens"
    if at_a_time := result.get("concurrency"):  # none: all at once, as in older results
        what += f", {at_a_time} at a time"
    what += f", {result['steps']:,} steps of {result['step_ms']:.2f} ms"
    if result["speculation"]:
        what += f", {result['rounds']:,} rounds of {result['speculation']}"
    device = machine["gpu"] or machine["cpu"] or "CPU"
    return f"Recording {result['model']}: {what}, {device}, {result['date']}"


def _rows(result: Result) -> list[tuple[str, ...]]:
    """The last column says how much longer a recorded run takes."""
    durations = result["duration_s"]
    recorded = durations[RECORDED]["median"]
    rows = [("run", "median", "min..max", "recording beside it")]
    for name, of in durations.items():
        over = NONE if name == RECORDED else f"{recorded / of['median'] - 1:+.1%}"
        rows.append((name, f"{of['median']:.3f} s", f"{of['min']:.3f}..{of['max']:.3f}", over))
    return rows


def _missed(result: Result) -> list[str]:
    missed = aims.missed_recording(result)
    return ["", f"Short of what it aims at: {'; '.join(missed)}."] if missed else []
