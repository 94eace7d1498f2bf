"""Runs the tests that need a GPU and keeps what came of them: `python -m benchmarks.gpu_tests -o FILE [pytest arguments]`.

First those that need the card to themselves, one after the other; then the others, in `--processes` processes. Passed, failed
and skipped tests are counted by file; a failed one is named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
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
            failed.append(f"{module}::{case.attrib['name']}")
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
    results, codes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for marks, how in (("gpu and alone", []), ("gpu and not alone", shared)):
            report = Path(folder) / "report.xml"
            # A process of its own: what the card keeps for it is given back.
            command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", *how]
            codes.append(subprocess.run([*command, *(rest or [str(ROOT / "tests")])], check=False).returncode)
            results.append(read_report(report))
    result = add_reports(results)
    document = {
        "benchmark": "gpu tests",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": options.commit or machine["commit"],
        "card": torch.cuda.get_device_name(),
        "environment": machine,
        **result,
    }
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
