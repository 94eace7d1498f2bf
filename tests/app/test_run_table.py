"""A run's workload in a few words."""

from __future__ import annotations

from typing import Any

import pytest

from app.components.run_table import duration_s, workload_text
from backend.workload.spec import Workload
from tests.app.kernel_runs import add_kernel_run
from tests.app.quantization_runs import add_quantization_run
from tests.app.stored_runs import TOKENS, FakeServices, add_run

TRACE = {"kind": "trace", "file": "/data/azure.csv"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "16 built-in chat prompts, all at once, 64 out"),
        ({"arrivals": {"kind": "gamma", "rate": 0.5}}, "16 built-in chat prompts, gamma 0.5/s, 64 out"),
        ({"source": TRACE}, "32 of azure.csv, times of the trace"),
        ({"source": TRACE, "arrivals": {"kind": "trace", "speedup": 2.5}}, "32 of azure.csv, times of the trace ×2.5"),
        (
            {"source": {"kind": "mooncake", "file": "m.jsonl", "limit": 9}, "arrivals": {"kind": "closed_loop"}},
            "9 of m.jsonl, closed loop of 4",
        ),
        (
            {
                "source": {"kind": "conversations", "turns": {"kind": "uniform", "min": 1, "max": 3}},
                "arrivals": {"kind": "constant", "rate": 2.0},
                "output_len": {"kind": "uniform", "min": 1, "max": 3},
            },
            "4 conversations, constant rate 2/s, uniform out",
        ),
        ({"sampling": {"n": 4}}, "16 built-in chat prompts × 4 samples, all at once, 64 out"),
        (
            {"source": {"kind": "synthetic"}, "priorities": {"10": 0.5, "-1": 1.0, "2": 1.0}},
            "16 synthetic of priority -1, 2, 10, all at once, 64 out",
        ),
        (
            {"source": {"kind": "prompts", "file": "/a/p.jsonl", "chat": False}},
            "p.jsonl raw prompts, all at once, 64 out",
        ),
        (
            {"source": {"kind": "prompts", "file": "p.jsonl", "limit": 2}},
            "2 of p.jsonl chat prompts, all at once, 64 out",
        ),
    ],
)
def test_a_workload_in_words(data: dict[str, Any], words: str) -> None:
    assert workload_text(Workload.from_dict(data).to_dict()) == words


def test_a_workload_stored_before_samples_and_priorities() -> None:
    stored = Workload().to_dict()
    del stored["priorities"], stored["sampling"]["n"]
    assert workload_text(stored) == workload_text(Workload().to_dict())


def test_how_long_a_run_took(services: FakeServices) -> None:
    """A lab's from its start to its end, as recorded; one that never began has taken no time that is known."""
    lab = {"experiments": ["bench"], "ops": None, "dtype": None}
    run_ids = [
        add_run(services, step_s=0.05),
        add_kernel_run(services),
        add_quantization_run(services),
        services.repository.create(lab, {}, kind="kernels"),
        add_run(services, status="failed", error="boom"),
    ]
    durations = [duration_s(run) for run in services.repository.get_all(run_ids)]
    assert durations == [pytest.approx(0.05 * TOKENS), 1.0, 90.0, None, None]
