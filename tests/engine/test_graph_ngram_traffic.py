"""Who comes, ends or gets in between while rounds follow each other without the host, whose drafts are from the text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.workload.targets import StreamEvent
from tests.engine.driving import Answer, Pausing, answers, check_idle, config_of, held, submit, submit_to
from tests.engine.heads import answers_and_rounds
from tests.engine.looking_up import GREEDY, OPTIONS, PROMPTS, check_drafts, circle, count_rounds
from tests.engine.test_engine_host import StepSink
from tests.engine.test_speculation import follow_pool
from tests.helpers import dense_greedy, load_oracle
from tests.worker.recorded_graphs import recorded_graphs


@pytest.fixture
def calls(replays: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_rounds(monkeypatch)


@pytest.fixture(scope="module")
def expected(few_tokens: Path) -> dict[str, list[int]]:
    oracle = load_oracle(few_tokens)
    return {key: dense_greedy(oracle, prompt, 48) for key, prompt in PROMPTS.items()}


def test_requests_come_and_go(graph_host: EngineHost, calls: Counter[str], few_tokens: Path, expected: Any) -> None:
    """They end at a stop id in the middle of what is under way, or by an abort, and others take their places and their ids."""
    graph_host.load(config_of(few_tokens, **OPTIONS))
    for turn, stopped in enumerate(PROMPTS):
        stop_id = expected[stopped][7]
        begun = Pausing()
        submit_to(begun, graph_host, f"{turn}", PROMPTS[stopped], **GREEDY)
        with begun.paused():
            going = {key: submit(graph_host, key, prompt, **GREEDY) for key, prompt in PROMPTS.items() if key != "p2"}
            ending = submit(graph_host, "ending", PROMPTS[stopped], **GREEDY | {"stop_token_ids": (stop_id,)})
        assert ending.finish_reason == "stop"
        assert ending.token_ids == expected[stopped][: expected[stopped].index(stop_id)]
        graph_host.abort(f"{turn}")
        again = submit(graph_host, "ending", PROMPTS["p2"], **GREEDY)
        for key, answer in {**going, "p2": again}.items():
            assert answer.finish_reason == "length"
            assert answer.token_ids == expected[key]
        assert begun.last is not None
        assert begun.token_ids == expected[stopped][: len(begun.token_ids)]
    check_idle(graph_host)
    assert calls["repeat"] > 10


@pytest.mark.parametrize("offset", range(6))
def test_an_end_anywhere_in_an_accepted_block(
    graph_host: EngineHost, calls: Counter[str], circling: Path, offset: int
) -> None:
    """By a stop id or by `max_tokens`, beside a request that goes on; the round behind it is under way by then."""
    graph_host.load(config_of(circling, **OPTIONS | {"model__max_model_len": 192}))
    prompt, at = circle(0, 45), 25 + offset
    with held(graph_host):
        going = submit(graph_host, "going", prompt, max_tokens=70, ignore_eos=True)
        stopped = submit(
            graph_host, "stopped", prompt, max_tokens=70, stop_token_ids=(circle(45 + at, 1)[0],), ignore_eos=True
        )
        limited = submit(graph_host, "limited", prompt, max_tokens=at + 12, ignore_eos=True)
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", circle(45, at))
    assert (limited.finish_reason, limited.token_ids) == ("length", circle(45, at + 12))
    assert (going.finish_reason, going.token_ids) == ("length", circle(45, 70))
    assert stopped.events[-1].origins == ["accepted"] * offset
    check_idle(graph_host)
    assert calls["repeat"] > 5


def test_the_end_of_the_context(graph_host: EngineHost, calls: Counter[str], circling: Path) -> None:
    """From different places before it, beside each other; what is left of it is drafted when the host knows the result."""
    graph_host.load(config_of(circling, **OPTIONS | {"model__max_model_len": 120}))
    prompts = {str(length): circle(0, length) for length in (45, 52, 66, 100, 114)}
    collected, rounds = answers_and_rounds(graph_host, prompts, max_tokens=99, ignore_eos=True)
    for key, prompt in prompts.items():
        end = ("length", circle(len(prompt), 120 - len(prompt)))
        assert (collected[key].finish_reason, collected[key].token_ids) == end
    check_drafts(prompts, collected, rounds)
    assert max(len(prompts[it.request_id]) + it.position + len(it.draft_token_ids) for it in rounds) == 119
    assert calls["repeat"] > 2


def test_rounds_begin_where_plain_steps_that_did_not_wait_for_the_host_end(
    graph_host: EngineHost, replays: Counter[str], calls: Counter[str], circling: Path
) -> None:
    """Of those the device has sampled the tokens, but has them in no text; then plain steps come again, and rounds again."""
    graph_host.load(config_of(circling, **OPTIONS | {"model__max_model_len": 192, "speculative__max_batch": 2}))
    prompts = {str(index): circle(index, 42 + 9 * index) for index in range(3)}
    late = _PausingLate()
    with held(graph_host):
        submit_to(late, graph_host, "0", prompts["0"], max_tokens=110, ignore_eos=True)
        other = submit(graph_host, "1", prompts["1"], max_tokens=110, ignore_eos=True)
        first = submit(graph_host, "2", prompts["2"], max_tokens=20, ignore_eos=True)
    with late.paused():
        assert calls["repeat"] > 1
        again = submit(graph_host, "again", prompts["2"], max_tokens=20, ignore_eos=True)
    for index, answer in enumerate((late, other, first)):
        assert answer.finish_reason == "length"
        assert answer.token_ids == circle(index + len(prompts[str(index)]), len(answer.token_ids))
    assert again.finish_reason == "length"
    assert again.token_ids == first.token_ids
    assert replays["decode_graphs"] >= 38
    assert calls["repeat"] > 4


class _PausingLate(Pausing):
    """When rounds have come behind the plain steps."""

    def take(self, event: StreamEvent) -> None:
        if len(self.token_ids) < 50:
            Answer.take(self, event)
        else:
            super().take(event)


def test_sampled_requests_beside_greedy_ones(graph_host: EngineHost, calls: Counter[str], few_tokens: Path) -> None:
    """They get the tokens of plain decoding, which little of a text repeats; behind them greedy ones go on."""
    oracle = load_oracle(few_tokens)
    expected = {key: dense_greedy(oracle, PROMPTS[key], 60) for key in ("p15", "p17")}
    filters: dict[str, Any] = {"temperature": 0.4, "top_k": 5, "seed": 3, "max_tokens": 30, "ignore_eos": True}
    graph_host.load(config_of(few_tokens, **OPTIONS | {"speculative__method": "none"}))
    plain = answers(graph_host, {"s": PROMPTS["p2"]}, **filters)["s"].token_ids
    graph_host.load(config_of(few_tokens, **OPTIONS))
    with held(graph_host):
        greedy = {key: submit(graph_host, key, PROMPTS[key], max_tokens=60, ignore_eos=True) for key in expected}
        sampled = submit(graph_host, "s", PROMPTS["p2"], **filters)
    assert {key: answer.last and answer.token_ids for key, answer in greedy.items()} == expected
    assert sampled.finish_reason == "length"
    assert sampled.token_ids == plain
    assert sampled.last.speculation is not None
    assert sampled.last.speculation.num_accepted_tokens > 0
    assert calls["repeat"] > 3


def test_key_frames_have_what_rounds_accepted(few_tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in blocks, step by step: with a key frame for every step as without any but the first."""
    options = OPTIONS | {"cache__block_size": 4, "cache__num_blocks": 60}
    seen, calls = [], Counter[str]()
    for key_frame_steps in (1, 1000):
        monkeypatch.setattr("backend.engine.step_recorder.KEY_FRAME_STEPS", key_frame_steps)
        sink = StepSink()
        with recorded_graphs(), pytest.MonkeyPatch.context() as patch:
            calls = count_rounds(patch)
            graph_host = EngineHost()
            graph_host.load(config_of(few_tokens, **options))
            graph_host.set_sink(sink)  # type: ignore[arg-type]
            answers(graph_host, {"a": PROMPTS["p17"]}, max_tokens=70, ignore_eos=True)
            graph_host.set_sink(None)
            graph_host.close()
        follow_pool(sink, 60, 4)
        chunks = [(data, first, last) for kind, data, first, last in sink.chunks if kind == "steps"]
        # Read anew for each step, so that it is its own key frame that tells.
        moments = [PoolHistory(LedgerReader(chunks), 4).at(step.step) for step in sink.steps]
        seen.append([moment.num_tokens for moment in moments if moment is not None])
    assert calls["repeat"] > 5
    assert seen[0] == seen[1]
