"""Priorities of a workload: drawn by their weights, apart from everything else that is drawn, and the same in every spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from app.components.settings_text import setting_lines, toml_document
from app.settings_input import engine_config_and_workload
from app.state import fill_form, read_form
from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.workload.datasets import build_requests, build_warmup_requests, workload_notices
from backend.workload.draws import Purpose, priorities, uniforms
from backend.workload.spec import Workload

WEIGHTS = {-3: 0.5, 0: 1.0, 10: 2.5}


def workload(count: int = 200, **changes: Any) -> Workload:
    return Workload.from_dict({"source": {"kind": "synthetic", "num_requests": count, "prompt_len": 4}, **changes})


def drawn(spec: Workload) -> list[int]:
    return [request.priority for request in build_requests(spec, 512)]


def test_a_number_is_drawn_as_often_as_its_weight_says():
    counts = [priorities(WEIGHTS, 1, 20_000).count(number) for number in WEIGHTS]
    assert stats.chisquare(counts, [20_000 * weight / 4 for weight in WEIGHTS.values()]).pvalue > 0.01
    by_hand = [-3 if draw < 0.125 else 0 if draw < 0.375 else 10 for draw in uniforms(7, Purpose.PRIORITIES, 50)]
    assert priorities(WEIGHTS, 7, 50) == by_hand
    assert priorities(dict(reversed(WEIGHTS.items())), 7, 50) == by_hand, "whatever the order they are written in"
    assert priorities(WEIGHTS, 7, 20) == by_hand[:20]
    assert priorities({5: 1e-6}, 7, 3) == [5] * 3
    assert priorities({}, 7, 3) == [0] * 3


def test_requests_are_otherwise_as_without_priorities():
    plain = build_requests(workload(arrivals={"kind": "poisson", "rate": 2.0}), 512)
    given = build_requests(workload(arrivals={"kind": "poisson", "rate": 2.0}, priorities={"1": 1.0, "2": 1.0}), 512)
    assert {request.priority for request in plain} == {0}
    assert {request.priority for request in given} == {1, 2}
    assert [(r.prompt, r.sampling, r.arrival_s) for r in plain] == [(r.prompt, r.sampling, r.arrival_s) for r in given]
    assert drawn(workload(seed=1, priorities={"1": 1.0, "2": 1.0})) != [request.priority for request in given]


def test_a_conversation_keeps_its_priority():
    spec = Workload.from_dict(
        {"source": {"kind": "conversations", "num_conversations": 20}, "priorities": {"0": 1.0, "1": 1.0}}
    )
    of_conversation: dict[int, set[int]] = {}
    for request in build_requests(spec, 512):
        assert request.turn is not None
        of_conversation.setdefault(request.turn.conversation, set()).add(request.priority)
    assert all(len(numbers) == 1 for numbers in of_conversation.values())
    assert [number for (number,) in of_conversation.values()] == priorities({0: 1.0, 1: 1.0}, 0, 20)


def test_warmup_requests_have_priorities_too():
    spec = workload(1, warmup_requests=100, priorities={"0": 1.0, "1": 1.0})
    assert {request.priority for request in build_warmup_requests(spec, 512)} == {0, 1}


def test_every_spelling_is_the_same_workload(tmp_path: Path):
    """JSON, TOML, one `--set` line or several, the form and back: equal settings, equal draws, equal hash."""
    spec = workload(priorities={"-3": 0.5, "0": 1, "10": 2.5})
    assert spec.priorities == WEIGHTS
    assert Workload.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert Workload(source=spec.source, priorities=WEIGHTS) == spec
    file = tmp_path / "workload.toml"
    file.write_text(toml_document(spec.to_dict()))
    base = ["workload.source.kind=synthetic", "workload.source.num_requests=200", "workload.source.prompt_len=4"]
    inline = [*base, "workload.priorities={10 = 2.5, -3 = 0.5, 0 = 1.0}"]
    for path, lines in ((file, []), (None, inline), (None, setting_lines(EngineConfig(), spec))):
        config, read = engine_config_and_workload(None, path, lines)
        assert (config, read) == (EngineConfig(), spec)
        assert read.stable_hash() == spec.stable_hash()
        assert drawn(read) == drawn(spec)
    assert read_form(fill_form(EngineConfig(), spec)) == (EngineConfig(), spec)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"high": 1.0}, r"priorities.high = 'high': input should be a valid integer"),
        ({"1.5": 1.0}, r"'1.5': input should be a valid integer"),
        ({"01": 1.0}, r"'01': input should be a valid integer"),
        ({"3000000000": 1.0}, r"priorities.3000000000 = 3000000000: input should be less than 2147483648"),
        ({"0": 0}, r"priorities.0 = 0: input should be greater than 0"),
        ({"0": "much"}, r"priorities.0 = 'much': input should be a valid number"),
        ({"0": float("inf")}, r"priorities.0 = inf: input should be (less|a finite)"),
        ([0, 1], r"priorities = \[0, 1\]: input should be a valid dictionary"),
    ],
)
def test_bad_priorities_are_named(value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        workload(priorities=value)


def test_what_is_not_heeded_or_makes_no_difference_is_said():
    spec = workload(priorities={"0": 1.0, "1": 3.0})
    assert workload_notices(spec, None, "priority") == workload_notices(spec, None) == ()
    assert workload_notices(spec, None, "fcfs") == (
        "workload.priorities are not heeded: scheduler.policy is 'fcfs', and only 'priority' does",
    )
    assert workload_notices(workload(), None, "fcfs") == ()
    alike = workload(sampling={"n": 3})
    assert workload_notices(alike, None, "fcfs") == (
        "the 3 samples of each prompt are alike: sampling.temperature is 0",
    )
    assert workload_notices(alike.with_overrides({"sampling.temperature": 0.5}), None, "fcfs") == ()
