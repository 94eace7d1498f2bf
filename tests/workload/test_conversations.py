"""Planned conversations: lengths, pauses and ids are fixed by the workload; what passes the context is left out and said."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from scipy import stats

from backend.errors import ConfigError
from backend.workload.conversations import Turn
from backend.workload.datasets import (
    WorkloadRequest,
    build_requests,
    build_warmup_requests,
    check_workload,
    count_requests,
    prompts_digest,
    workload_notices,
)
from backend.workload.spec import MAX_TURNS, Workload

SPREAD = {"kind": "uniform", "min": 1, "max": 9}


def workload(arrivals: dict[str, Any] | None = None, output_len: Any = 10, **source: Any) -> Workload:
    data: dict[str, Any] = {"source": {"kind": "conversations", **source}, "output_len": output_len}
    return Workload.from_dict(data | ({"arrivals": arrivals} if arrivals else {}))


def turn_of(request: WorkloadRequest) -> Turn:
    assert request.turn is not None
    return request.turn


def ids(request: WorkloadRequest) -> tuple[int, ...]:
    assert request.prompt.token_ids is not None
    return request.prompt.token_ids


def conversations(spec: Workload, max_model_len: int | None = None) -> dict[int, list[WorkloadRequest]]:
    requests = build_requests(spec, 50_000, max_model_len)
    return {number: list(turns) for number, turns in groupby(requests, key=lambda r: turn_of(r).conversation)}


def test_the_default_is_four_conversations_of_four_turns():
    requests = build_requests(workload(), 50_000)
    assert count_requests(workload()) == len(requests) == 16
    assert [request.index for request in requests] == list(range(16))
    assert [(turn_of(r).conversation, turn_of(r).number) for r in requests] == [
        (c, t) for c in range(4) for t in range(4)
    ]
    assert [len(ids(request)) for request in requests] == [64, 32, 32, 32] * 4
    assert {turn_of(request).think_s for request in requests} == {0.0}
    assert len({ids(request)[:8] for request in requests}) == 16
    assert len({request.sampling.seed for request in requests}) == 16


def test_all_conversations_begin_with_the_system_prompt():
    with_system = build_requests(workload(system_len=100), 50_000)
    without = build_requests(workload(), 50_000)
    (system,) = {ids(r)[:100] for r in with_system if turn_of(r).number == 0}
    for request, bare in zip(with_system, without, strict=True):
        assert ids(request) == (system if turn_of(request).number == 0 else ()) + ids(bare)


def test_first_turns_arrive_as_asked_and_further_ones_when_earlier_ones_end():
    by_number = conversations(workload({"kind": "constant", "rate": 2.0}))
    assert [turns[0].arrival_s for turns in by_number.values()] == [0.0, 0.5, 1.0, 1.5]
    assert {turn.arrival_s for turns in by_number.values() for turn in turns[1:]} == {None}


def test_no_conversation_depends_on_another_ones_turns_or_on_how_many_there_are():
    spec = {"turns": SPREAD, "first_len": SPREAD, "turn_len": SPREAD, "think_time_s": 1.0}
    few, many = workload(output_len=SPREAD, num_conversations=5, **spec), workload(output_len=SPREAD, **spec)
    many = many.with_overrides({"source.num_conversations": 50})
    assert list(conversations(few).values()) == list(conversations(many).values())[:5]
    counts = [len(turns) for turns in conversations(many).values()]
    assert set(counts) == set(range(1, 10))
    longer = conversations(many.with_overrides({"source.turns": 9}))
    for number, turns in conversations(many).items():
        kept = longer[number][: len(turns)]
        assert [(ids(r), r.turn, r.sampling.max_tokens) for r in turns] == [
            (ids(r), r.turn, r.sampling.max_tokens) for r in kept
        ]


def test_pauses_are_exponential_with_the_mean_that_was_asked_for():
    requests = build_requests(workload(num_conversations=400, turns=11, think_time_s=2.5), 100)
    pauses = np.array([turn_of(r).think_s for r in requests if turn_of(r).number])
    assert pauses.size == 4000
    assert stats.kstest(pauses, "expon", args=(0, 2.5)).pvalue > 0.01
    assert all(turn_of(r).think_s == 0 for r in requests if turn_of(r).number == 0)


@pytest.mark.parametrize("max_model_len", [75, 100, 115, 116, 117, 157, 158, 1000])
def test_a_conversation_ends_before_the_turn_that_would_pass_the_context(max_model_len: int):
    """64 + 10 tokens with the first turn, 32 + 10 more with each other."""
    spec = workload(num_conversations=3)
    whole, kept = conversations(spec), conversations(spec, max_model_len)
    turns = max(n for n in range(1, 5) if 74 + 42 * (n - 1) <= max_model_len)
    for number in range(3):
        assert kept[number] == whole[number][:turns], "nothing else is changed, indices neither"
    notice = f"3 of 3 conversations end before the turn that would pass the context of {max_model_len:,} tokens"
    assert workload_notices(spec, max_model_len) == ((notice,) if turns < 4 else ())


def test_only_conversations_that_are_too_long_are_cut():
    spec = workload(num_conversations=200, turns=SPREAD, turn_len=SPREAD, output_len=SPREAD, system_len=20)
    whole, kept = conversations(spec), conversations(spec, 110)

    def sizes(turns: list[WorkloadRequest]) -> np.ndarray:
        """Of everything said by the end of each turn."""
        return np.cumsum([len(ids(r)) + r.sampling.max_tokens for r in turns])

    num_cut = 0
    for number, turns in whole.items():
        fitting = int(np.sum(sizes(turns) <= 110))
        assert kept.get(number, []) == turns[:fitting]
        num_cut += fitting < len(turns)
    assert 20 < num_cut < 180
    assert workload_notices(spec, 110)[0].startswith(f"{num_cut} of 200 conversations end before")


def test_conversations_that_do_not_fit_at_all():
    with pytest.raises(
        ConfigError, match="no conversation's first turn fits into the target's context of 73 tokens; lower"
    ):
        build_requests(workload(), 100, 73)
    spec = workload(first_len={"kind": "uniform", "min": 60, "max": 70}, num_conversations=50)
    kept = conversations(spec, 74)
    assert 0 < len(kept) < 50
    assert workload_notices(spec, 74) == (
        "50 of 50 conversations end before the turn that would pass the context of 74 tokens",
    )


def test_what_is_too_much_is_refused_without_a_model():
    for source, message in [
        ({"turns": MAX_TURNS + 1}, "source.turns: a conversation has 1,001 turns; at most 1,000 are allowed"),
        ({"turns": 11, "num_conversations": 10_000}, "conversations have 110,000 turns in all; at most 100,000"),
        ({"turn_len": 2**24}, "tokens in all; at most 20,000,000 are allowed"),
        ({"system_len": 2**24}, "tokens in all; at most 20,000,000 are allowed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_workload(workload(**source))
    with pytest.raises(ConfigError, match="min_tokens = 20 is above the shortest output_len"):
        check_workload(workload().with_overrides({"sampling.min_tokens": 20}))


def test_warmup_requests_are_first_turns_of_their_own():
    spec = workload(system_len=8).with_overrides({"warmup_requests": 3})
    warmup, measured = build_warmup_requests(spec, 50_000), build_requests(spec, 50_000)
    assert [(len(ids(request)), request.turn) for request in warmup] == [(72, None)] * 3
    assert not {ids(request)[:8] for request in warmup} & {ids(request)[:8] for request in measured}


def test_the_digest_tells_turns_from_conversations():
    two, four = workload(turns=2, num_conversations=2), workload(turns=1, num_conversations=4)
    one_each = [build_requests(spec, 50_000) for spec in (two, four)]
    assert prompts_digest(one_each[0]) == prompts_digest(build_requests(two, 50_000))
    bare = [WorkloadRequest(r.index, r.prompt, r.sampling, r.arrival_s) for r in one_each[0]]
    assert prompts_digest(bare) != prompts_digest(one_each[0])
