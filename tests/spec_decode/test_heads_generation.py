"""Conversations that a target writes: how their parts are put together, and that the answers are the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError, EngineError
from backend.sampling_params import SamplingParams
from backend.spec_decode.heads.generation import (
    ChatFrame,
    ConversationPlan,
    ConversationWriter,
    plan_conversation,
    read_openings,
    read_prompts,
)
from backend.workload.targets import StreamEvent
from tests.helpers import assert_greedy, make_tiny_llama

MAX_LENGTH = 96
BEFORE_USER, BEFORE_ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "<|im_end|>\n<|im_start|>user\n"
END = 258  # <|im_end|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[EngineHost]:
    host = EngineHost()
    host.load(EngineConfig().with_overrides({"model.name": str(folder), "cache.num_blocks": 200}))
    yield host
    host.close()


class ScriptedHost:
    """Serves what it is told to, in order of the requests, and keeps what it was asked."""

    def __init__(self, host: EngineHost, outputs: list[tuple[list[int], Any]]) -> None:
        self.tokenizer = host.tokenizer
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self._outputs = iter(outputs)

    def submit(self, request_id: str, token_ids: list[int], sampling: SamplingParams, on_event: Any) -> None:
        self.asked.append((list(token_ids), sampling))
        output, reason = next(self._outputs)
        on_event(StreamEvent(request_id, 0.0, tuple(output), "", finish_reason=reason))


def write(host: Any, *plans: ConversationPlan, max_length: int = MAX_LENGTH) -> list[Any]:
    return ConversationWriter(host, max_length).write(plans)


def plan(**changes: Any) -> ConversationPlan:
    values = {
        "seed": 7,
        "num_turns": 1,
        "opening": None,
        "user_temperature": 1.0,
        "answer_temperature": 0.0,
        "text": None,
    }
    return ConversationPlan(**(values | changes))


def test_the_frame_is_what_the_template_puts_around(host: EngineHost) -> None:
    frame, encode = ChatFrame.of(host.tokenizer), host.tokenizer.encode
    assert list(frame.before_user) == encode(BEFORE_USER)
    assert list(frame.before_answer) == encode(BEFORE_ANSWER)
    assert list(frame.between) == encode(BETWEEN)


def test_two_turns_make_the_conversation_that_the_template_would(host: EngineHost) -> None:
    """Whether a part ends by itself or is cut, what ends a turn is there once."""
    encode = host.tokenizer.encode
    scripted = ScriptedHost(
        host,
        [
            ([*encode("who"), END], "stop"),
            ([*encode("me"), END], "stop"),
            (encode("and then"), "length"),
            (encode("nothing"), "length"),
        ],
    )
    (conversation,) = write(scripted, plan(num_turns=2, answer_temperature=0.7), max_length=400)
    said = f"{BEFORE_USER}who{BEFORE_ANSWER}me{BETWEEN}and then{BEFORE_ANSWER}nothing"
    assert conversation.token_ids.tolist() == encode(said)
    answers = [[*encode("me"), END], encode("nothing")]
    assert [conversation.token_ids[first:end].tolist() for first, end in conversation.answers()] == answers
    assert not conversation.is_greedy
    prompts = [
        "",
        f"who{BEFORE_ANSWER}",
        f"who{BEFORE_ANSWER}me{BETWEEN}",
        f"who{BEFORE_ANSWER}me{BETWEEN}and then{BEFORE_ANSWER}",
    ]
    assert [asked for asked, _ in scripted.asked] == [encode(BEFORE_USER + prompt) for prompt in prompts]
    assert [sampling.temperature for _, sampling in scripted.asked] == [1.0, 0.7, 1.0, 0.7]
    assert len({sampling.seed for _, sampling in scripted.asked}) == 4


def test_a_conversation_is_cut_soon_after_an_answer_begins_to_loop(host: EngineHost) -> None:
    encode = host.tokenizer.encode
    said = encode("so:" + "and " * 40)
    scripted = ScriptedHost(host, [([*encode("who"), END], "stop"), (said, "length")])
    (conversation,) = write(scripted, plan(num_turns=2), max_length=400)
    ((first, end),) = conversation.answers()
    assert conversation.token_ids[first:end].tolist() == said[: len("so:and ") + 32]
    assert end == len(conversation.token_ids)


def test_an_opening_begins_the_user_s_words_and_a_text_is_all_of_them(host: EngineHost) -> None:
    encode = host.tokenizer.encode
    answer = ([1, 2, END], "stop")
    scripted = ScriptedHost(host, [(encode(" one"), "length"), answer, answer])
    opened, given = (write(scripted, plan(opening="Which "))[0], write(scripted, plan(text="Why?"))[0])
    assert opened.token_ids.tolist() == encode(f"{BEFORE_USER}Which one{BEFORE_ANSWER}") + answer[0]
    assert given.token_ids.tolist() == encode(f"{BEFORE_USER}Why?{BEFORE_ANSWER}") + answer[0]


def test_where_there_is_no_room_for_an_answer_there_is_no_conversation(host: EngineHost) -> None:
    scripted = ScriptedHost(host, [(host.tokenizer.encode("who"), "length")])
    assert write(scripted, plan(), plan(text="Why is it so?"), max_length=20) == []
    assert [sampling.max_tokens for _, sampling in scripted.asked] == [9]


def test_a_request_that_fails_is_an_error(host: EngineHost) -> None:
    with pytest.raises(EngineError, match="not written"):
        write(ScriptedHost(host, [([], "error")]), plan())


def test_the_target_answers_and_keeps_within_the_length(folder: Path, host: EngineHost) -> None:
    """Whatever is drawn; a greedy answer is the one that transformers gives, an equal plan gives an equal conversation."""
    openings = read_openings()
    plans = [plan_conversation(0, index, openings, (), True) for index in range(12)]
    written = write(host, *plans)
    assert [each.token_ids.tolist() for each in write(host, *plans)] == [each.token_ids.tolist() for each in written]
    for drawn, conversation in zip(plans, written, strict=True):
        assert len(conversation.token_ids) <= MAX_LENGTH
        assert conversation.is_greedy == (drawn.answer_temperature == 0)
        if conversation.is_greedy:
            for first, end in conversation.answers():
                ids = conversation.token_ids.tolist()
                assert_greedy(folder, ids[:first], ids[first:end])
    assert 0 < sum(each.is_greedy for each in written) < len(written)


def test_plans_are_a_function_of_seed_and_number() -> None:
    openings, texts = read_openings(), ("a", "b", "c")

    def drawn(seed: int, number: int, *what: Any) -> list[ConversationPlan]:
        return [plan_conversation(seed, index, openings, *what) for index in range(number)]

    assert drawn(0, 50, (), True)[:20] == drawn(0, 20, (), True)
    assert drawn(1, 20, (), True) != drawn(0, 20, (), True)
    assert [each.text for each in drawn(0, 6, texts, False)] == ["a", "b", "c"] * 2
    assert [each.text for each in drawn(0, 6, texts, True)] == [None, "a", None, "b", None, "c"]
    repeated = [each for each in drawn(0, 400, texts, False)[3:] if each.answer_temperature == 0]
    assert repeated == [], "a text's greedy answer is the same each time"
    many = drawn(0, 1000, (), True)
    assert 400 < sum(each.opening is not None for each in many) < 600
    assert {each.opening for each in many} == {None, *openings}
    assert 400 < sum(each.answer_temperature == 0 for each in many) < 600
    assert 200 < sum(each.num_turns == 2 for each in many) < 400


def test_prompts_are_paragraphs_or_records(tmp_path: Path) -> None:
    text, records, empty = (tmp_path / name for name in ("text.txt", "records.jsonl", "empty.txt"))
    text.write_text("\n\nOne\nand more.\n \n\n Two\n")
    records.write_text('{"prompt": "a\\n\\nb"}\n\n{"text": "c"}\n')
    empty.write_text(" \n\n")
    assert read_prompts(text) == ["One\nand more.", "Two"]
    assert read_prompts(records) == ["a\n\nb", "c"]
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(empty)


def test_openings_are_no_evaluation_prompts() -> None:
    openings = read_openings()
    assert len(set(openings)) == len(openings) > 50
    assert max(map(len, openings)) < 80
