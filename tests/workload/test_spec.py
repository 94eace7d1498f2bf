"""Workloads as settings: what is left out, what goes together, and JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend.errors import ConfigError
from backend.workload.spec import TraceSource, TraceTimes, Workload

TRACE = {"kind": "trace", "file": "trace.csv"}
MOONCAKE = {"kind": "mooncake", "file": "trace.jsonl"}


@pytest.mark.parametrize(
    "data",
    [
        {"source": TRACE},
        {"source": TRACE | {"limit": 5, "max_prompt_len": 9}, "arrivals": {"kind": "gamma", "rate": 2.0}},
        {"source": MOONCAKE | {"scale": 16, "max_output_len": 1}, "arrivals": {"kind": "trace", "speedup": 0.5}},
        {"source": {"kind": "conversations", "turns": {"kind": "uniform", "min": 2, "max": 5}, "think_time_s": 1.5}},
        {"arrivals": {"kind": "gamma", "rate": 1.0, "burstiness": 0.25}},
    ],
)
def test_json_and_back(data: dict[str, Any]):
    workload = Workload.from_dict(data)
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload
    assert workload.stable_hash() != Workload().stable_hash()


def test_a_trace_arrives_at_its_own_times_unless_others_are_given():
    assert Workload.from_dict({"source": TRACE}).arrivals == TraceTimes()
    assert Workload(source=TraceSource(file="trace.csv")).arrivals == TraceTimes()
    assert Workload.from_dict({"source": MOONCAKE, "arrivals": {"kind": "all_at_once"}}).arrivals.kind == "all_at_once"
    assert Workload.from_dict({"source": {"kind": "conversations"}}).arrivals.kind == "all_at_once"


def test_overrides_that_change_the_source_change_its_arrivals_with_it():
    trace = Workload().with_overrides({"source.kind": "trace", "source.file": "trace.csv"})
    assert trace == Workload.from_dict({"source": TRACE})
    assert Workload().with_overrides({"source": TRACE}) == trace
    assert trace.with_overrides({"source.kind": "synthetic"}) == Workload.from_dict({"source": {"kind": "synthetic"}})
    assert trace.with_overrides({"seed": 3}).arrivals == TraceTimes()
    fast = Workload().with_overrides({"source.kind": "trace", "source.file": "a", "arrivals.speedup": 3.0})
    assert fast.arrivals == TraceTimes(speedup=3.0)


def test_arrivals_that_were_chosen_stay():
    poisson = Workload().with_overrides({"arrivals.kind": "poisson", "arrivals.rate": 2.0})
    assert poisson.with_overrides({"source": TRACE}).arrivals == poisson.arrivals
    at_once = Workload.from_dict({"source": TRACE, "arrivals": {"kind": "all_at_once"}})
    assert at_once.with_overrides({"seed": 3}).arrivals.kind == "all_at_once"
    both = Workload().with_overrides({"source": TRACE, "arrivals.kind": "constant", "arrivals.rate": 1.0})
    assert both.arrivals.kind == "constant"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"arrivals.kind": "trace"},
            "arrivals.kind = 'trace' needs the times of a trace, and source.kind = 'prompts' has",
        ),
        ({"source.kind": "trace"}, "source.file is missing: it has no default"),
        ({"source": MOONCAKE | {"scale": 3}}, "scale = 3 does not divide block_len = 512"),
        ({"source": MOONCAKE | {"limit": 0}}, "source.limit = 0: input should be greater than or equal to 1"),
        (
            {"source.kind": "conversations", "source.turns": 0},
            "source.turns = 0: input should be greater than or equal",
        ),
        ({"source.kind": "conversations", "source.think_time_s": -1.0}, "source.think_time_s = -1.0"),
        ({"arrivals.kind": "gamma"}, "arrivals.rate is missing"),
        ({"arrivals.kind": "gamma", "arrivals.rate": 1.0, "arrivals.burstiness": 0.0}, "arrivals.burstiness = 0.0"),
        (
            {"source": TRACE, "arrivals.speedup": 0.0},
            "arrivals.speedup = 0.0: input should be greater than or equal to 0.0",
        ),
        ({"source": TRACE, "arrivals.speedup": 1e-300}, "arrivals.speedup = 1e-300: input should be greater than or"),
        (
            {"arrivals.kind": "constant", "arrivals.rate": 5e-324},
            "arrivals.rate = 5e-324: input should be greater than",
        ),
        ({"arrivals.kind": "poisson", "arrivals.rate": 5e-324}, "arrivals.rate = 5e-324: input should be greater than"),
        ({"arrivals.kind": "gamma", "arrivals.rate": 5e-324}, "arrivals.rate = 5e-324: input should be greater than"),
    ],
)
def test_what_cannot_be_is_named(overrides: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        Workload().with_overrides(overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
