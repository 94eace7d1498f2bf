"""The record of a test run, from the report that pytest itself writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_tests import add_reports, read_report, replace_failed

TESTS = """
import pytest

def test_right(): pass

@pytest.mark.parametrize("number", [1, 2])
def test_wrong(number): assert number == 2

@pytest.mark.skip
def test_left_out(): pass

@pytest.fixture
def broken(): raise RuntimeError

def test_without_its_fixture(broken): pass
"""


def test_every_outcome_is_counted_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_right(): pass")
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "."],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert read_report(report) == {
        "tests": {"passed": 3, "failed": 2, "skipped": 1},
        "failed": ["test_some.py::test_wrong[1]", "test_some.py::test_without_its_fixture"],
        "files": {"test_other": {"passed": 1}, "test_some": {"passed": 2, "failed": 2, "skipped": 1}},
    }


def test_several_runs_add_up() -> None:
    first = {"tests": {"passed": 2, "failed": 1}, "failed": ["one::test"], "files": {"one": {"passed": 2, "failed": 1}}}
    second = {"tests": {"passed": 3}, "failed": [], "files": {"one": {"passed": 1}, "two": {"passed": 2}}}
    assert add_reports([first, second]) == {
        "tests": {"passed": 5, "failed": 1},
        "failed": ["one::test"],
        "files": {"one": {"passed": 3, "failed": 1}, "two": {"passed": 2}},
    }


def test_what_was_run_again_counts_as_it_came_out_then() -> None:
    first = {
        "tests": {"passed": 2, "failed": 2},
        "failed": ["one.py::test_a", "two.py::test_b"],
        "files": {"one": {"passed": 2, "failed": 1}, "two": {"failed": 1}},
    }
    again = {
        "tests": {"passed": 1, "failed": 1},
        "failed": ["two.py::test_b"],
        "files": {"one": {"passed": 1}, "two": {"failed": 1}},
    }
    assert replace_failed(first, again) == {
        "tests": {"passed": 3, "failed": 1},
        "failed": ["two.py::test_b"],
        "files": {"one": {"passed": 3}, "two": {"failed": 1}},
    }
