"""Runs the tests that need a GPU and keeps what came of them: `python -m benchmarks.gpu_tests -o FILE [pytest arguments]`.

First those that can share the card, in `--processes` processes, which also compiles the kernels; what fails there, where memory
may run out, runs once more by itself. Then those that need the card to themselves, one after the other. Passed, failed and
skipped tests are counted by file; one that failed at last is named, and so is one that was run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from backend.metrics.environment import environment

ROOT = Path(__file__).resolve().parents[1]


def read_report(path: Path) -> dict[str, Any]:
    """Counts of a JUnit report of pytest's, by outcome and by file."""
    total: Counter[str] = Counter()
    by_file: dict[str, Counter[str]] = {}
    failed = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcome = "failed" if outcome in ("failure", "error") else outcome
        module = case.attrib["classname"]
        total[outcome] += 1
        by_file.setdefault(module, Counter())[outcome] += 1
        if outcome == "failed":
            failed.append(f"{module.replace('.', '/')}.py::{case.attrib['name']}")
    return {"tests": dict(total), "failed": failed, "files": {name: dict(counts) for name, counts in by_file.items()}}


def add_reports(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What several runs of different tests come to."""
    total: Counter[str] = Counter()
    by_file: dict[str, Counter[str]] = {}
    failed: list[str] = []
    for report in reports:
        total.update(report["tests"])
        failed += report["failed"]
        for name, counts in report["files"].items():
            by_file.setdefault(name, Counter()).update(counts)
    return {"tests": dict(total), "failed": failed, "files": {name: dict(counts) for name, counts in by_file.items()}}


def replace_failed(report: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """A report whose failed tests were run again, with what came of those."""
    files = {
        name: {outcome: count for outcome, count in counts.items() if outcome != "failed"}
        for name, counts in report["files"].items()
    }
    tests = {outcome: count for outcome, count in report["tests"].items() if outcome != "failed"}
    return add_reports([{"tests": tests, "failed": [], "files": files}, again])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests", description=__doc__)
    parser.add_argument("--commit", help="to state where this is no checkout")
    parser.add_argument(
        "--processes", type=int, default=1, help="for tests that can share the card (pytest-xdist's -n)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options, rest = parser.parse_known_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; these tests are for one")
    machine: Mapping[str, Any] = environment()
    shared = ["-n", str(options.processes)] if options.processes > 1 else []
    options_of_pytest, places = _split(rest)
    with tempfile.TemporaryDirectory() as folder:

        def run(marks: str, *what: str) -> dict[str, Any]:
            report = Path(folder) / "report.xml"
            # A process of its own: what the card keeps for it is given back.
            command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}"]
            subprocess.run([*command, *options_of_pytest, *what], cwd=ROOT, check=False)
            return read_report(report)

        together = run("gpu and not alone", *shared, *places)
        again = together["failed"]
        if again:
            together = replace_failed(together, run("gpu and not alone", *again))
        result = add_reports([together, run("gpu and alone", *places)]) | {"run_again": again}
    document = {
        "benchmark": "gpu tests",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": options.commit or machine["commit"],
        "card": torch.cuda.get_device_name(),
        "environment": machine,
        **result,
    }
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(result["failed"]))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """pytest's options, and where the tests are."""
    places = [each for each in arguments if not each.startswith("-") and (ROOT / each.split("::")[0]).exists()]
    return [each for each in arguments if each not in places], places or ["tests"]


if __name__ == "__main__":
    main()
