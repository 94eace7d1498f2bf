"""Results of `benchmarks/quantized_quality.py` as a table, for a terminal and for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from backend.experiments.quantization_config import REFERENCE, variant_name
from benchmarks import stored
from benchmarks.grid import markdown_lines, text_lines

BEGIN, END = "<!-- quantized quality: begin -->", "<!-- quantized quality: end -->"
HEADER = ("weights", "bits per weight", "size", "perplexity", "over float32", "KL, nats", "same first choice")

Result = Mapping[str, Any]


def load_results(folder: Path) -> list[Result]:
    return stored.load_results("quantized_quality", folder)


def markdown(results: Iterable[Result]) -> str:
    """What was measured, and a table, for each result."""
    return "\n\n".join(_markdown(result) for result in results) or "No result is stored."


def text_table(result: Result) -> str:
    """The same for a terminal, with the reason where figures are missing, and what has to hold."""
    rows = [HEADER, *_rows(result)]
    lines = [_what(result), "", *text_lines(rows, [row.get("problem", "") for row in result["results"]])]
    lines += [line for note in _notes(result) for line in ("", note)]
    lines.append("")
    lines += [f"{'holds' if each['holds'] else 'FAILS'}  {each['what']}" for each in result["requirements"]]
    return "\n".join(lines)


def _markdown(result: Result) -> str:
    lines = [_what(result), "", *markdown_lines([HEADER, *_rows(result)])]
    lines += [line for note in _notes(result) for line in ("", note)]
    missed = [each["what"] for each in result["requirements"] if not each["holds"]]
    if missed:
        lines += ["", f"What does not hold: {'; '.join(missed)}."]
    return "\n".join(lines)


def _what(result: Result) -> str:
    options = result["options"]
    num_tokens = next((row["num_tokens"] for row in result["results"] if "num_tokens" in row), 0)
    commit = f", commit {result['commit'][:7]}" if result["commit"] else ""
    machine = result["card"] or result["environment"]["cpu"] or "CPU"
    return (
        f"{result['model']}, {num_tokens:,} tokens of {result['text']}; gptq and awq calibrated on {options['windows']} × "
        f"{options['window_length']} tokens of {result['calibration']}. {machine}, torch "
        f"{result['environment']['versions']['torch']}, {result['date']}{commit}."
    )


def _notes(result: Result) -> list[str]:
    """Why `int8` takes more than `w8a8_int8`, which has as many codes and scales, where it does."""
    bits = {row["variant"]: row["bits_per_weight"] for row in result["results"] if "bits_per_weight" in row}
    own, other = bits.get("int8"), bits.get("w8a8_int8")
    if result["card"] is None or own is None or other is None or own <= other:
        return []
    return [
        f"int8 takes {own:.2f} bits per weight beside {other:.2f} of w8a8_int8 because its codes come in chunks of 128 inputs "
        "on CUDA, so that 576 inputs take room for 640."
    ]


def _rows(result: Result) -> list[tuple[str, ...]]:
    reference = next((row.get("perplexity") for row in result["results"] if row["variant"] == REFERENCE), None)
    return [_cells(row, reference) for row in result["results"]]


def _cells(row: Result, reference: float | None) -> tuple[str, ...]:
    is_reference = row["variant"] == REFERENCE
    name = "float32" if is_reference else variant_name(row["variant"])
    if "perplexity" not in row:
        return name, *("–",) * (len(HEADER) - 1)
    compared = not is_reference and reference is not None
    return (
        name,
        f"{row['bits_per_weight']:.2f}",
        f"{row['weights_bytes'] / 2**20:,.0f} MiB",
        f"{row['perplexity']:,.3f}" if row["perplexity"] < 1e4 else f"{row['perplexity']:.2e}",
        f"{row['perplexity'] / reference - 1:+.2%}" if compared and reference else "–",
        f"{row['kl_mean']:.4f}" if compared else "–",
        f"{row['top1_agreement']:.1%}" if compared else "–",
    )
