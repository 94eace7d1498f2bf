"""Conversations without a page: what the model is sent, what becomes of its answer, and how they share the engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.components import playground_export, playground_text
from app.components.playground_answer import ChatSettings
from app.components.playground_chat import Conversation
from app.components.playground_store import MAX_KEPT, Playground
from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import EngineError, ModelError, RequestError
from backend.experiments.run_queue import RunQueue
from backend.metrics.stats import RunEnd, StatsSink
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from tests.app.chat_host import END, MAX_MODEL_LEN, DictatedHost
from tests.app.stored_runs import FakeServices
from tests.helpers import make_tiny_llama
from tests.waiting import PATIENCE_S, until

GREEDY = ChatSettings()
SAMPLED = ChatSettings(sampling=SamplingParams(temperature=0.7, seed=5, max_tokens=9))


@pytest.fixture
def host(services: FakeServices) -> Iterator[DictatedHost]:
    """Behind the services, with a real queue of runs."""
    host = services.fake_host = DictatedHost()  # type: ignore[assignment]
    queue = services.fake_queue = RunQueue(host)  # type: ignore[assignment]
    yield host
    host.may_load.set()
    queue.close()


@pytest.fixture
def chat(services: FakeServices, host: DictatedHost) -> Conversation:
    return Playground(services).begin()


def answer(chat: Conversation, host: DictatedHost, question: str, *token_ids: int) -> None:
    """A whole turn."""
    num_requests = len(host.requests)
    chat.ask(question, GREEDY)
    host.wait_for(num_requests + 1)
    host.say(*token_ids)
    host.say(END, end="stop")
    until(lambda: chat.under_way is None)


def ended(chat: Conversation) -> None:
    until(lambda: chat.under_way is None)


def test_each_turn_is_sent_with_all_that_was_said_before(chat: Conversation, host: DictatedHost):
    settings = ChatSettings(" Be brief. ", SAMPLED.sampling)
    answer(chat, host, "one", 0, 1)
    chat.ask("two", settings)
    host.wait_for(2)
    assert host.tokenizer.chats == [
        [{"role": "user", "content": "one"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "The sky"},
            {"role": "user", "content": "two"},
        ],
    ]
    assert [request.sampling for request in host.requests] == [GREEDY.sampling, SAMPLED.sampling]


def test_an_answer_grows_and_ends(chat: Conversation, host: DictatedHost):
    chat.ask("why", GREEDY)
    host.wait_for(1)
    turn = chat.under_way
    assert turn is not None
    assert turn.answer.view().status == "answering"
    assert turn.answer.view().ttft_ms is None
    host.say(0)
    first = turn.answer.view()
    assert (first.text, first.tokens_per_s, first.is_over) == ("The", None, False)
    host.say(1, 2)
    host.say(END, end="stop")
    ended(chat)
    last = turn.answer.view()
    assert (last.status, last.finish_reason, last.text) == ("finished", "stop", "The sky is")
    assert [(token.token_id, token.name) for token in last.tokens] == [(0, ""), (1, ""), (2, ""), (END, "<|end|>")]
    assert last.num_context_tokens == 1 + 4
    assert last.arrival_time is not None
    assert last.first_time is not None
    assert last.last_time is not None
    assert last.ttft_ms == first.ttft_ms == (last.first_time - last.arrival_time) * 1e3
    assert last.tokens_per_s == pytest.approx(3 / (last.last_time - last.first_time))


def test_stop_keeps_what_has_come_and_the_conversation_goes_on(chat: Conversation, host: DictatedHost):
    chat.ask("why", GREEDY)
    host.wait_for(1)
    host.say(0, 1)
    chat.stop()
    ended(chat)
    view = chat.turns[0].answer.view()
    assert (view.status, view.text) == ("stopped", "The sky")
    answer(chat, host, "and then", 3)
    assert host.tokenizer.chats[-1][1] == {"role": "assistant", "content": "The sky"}


def test_a_stop_that_overtakes_the_request_still_ends_it(
    chat: Conversation, host: DictatedHost, monkeypatch: pytest.MonkeyPatch
):
    submit = host.submit

    def stop_and_submit(*arguments: Any) -> None:
        chat.stop()  # the engine does not know the request yet
        submit(*arguments)

    monkeypatch.setattr(host, "submit", stop_and_submit)
    chat.ask("why", GREEDY)
    ended(chat)
    assert chat.turns[0].answer.view().status == "stopped"


def test_regenerating_draws_with_the_next_seed_and_editing_with_the_first(chat: Conversation, host: DictatedHost):
    answer(chat, host, "kept", 0)
    for index, question in enumerate(["why", "why", "why", "why not"]):
        chat.ask(question, SAMPLED, in_place_of=1 if index else None)
        host.wait_for(2 + index)
        host.say(1, end="length")
        ended(chat)
    assert [request.sampling.seed for request in host.requests[1:]] == [5, 6, 7, 5]
    assert [turn.question for turn in chat.turns] == ["kept", "why not"]
    assert host.tokenizer.chats[-1] == [
        {"role": "user", "content": "kept"},
        {"role": "assistant", "content": "The"},
        {"role": "user", "content": "why not"},
    ]
    chat.ask("why not", GREEDY, in_place_of=1)
    host.wait_for(6)
    assert host.requests[-1].sampling.seed == 0  # nothing is drawn at temperature 0


def test_only_the_last_turn_is_replaced_and_one_answer_comes_at_a_time(chat: Conversation, host: DictatedHost):
    answer(chat, host, "one", 0)
    answer(chat, host, "two", 1)
    with pytest.raises(RequestError, match="has gone on meanwhile"):
        chat.ask("one", GREEDY, in_place_of=0)
    with pytest.raises(RequestError, match="empty"):
        chat.ask(" \n", GREEDY)
    chat.ask("three", GREEDY)
    for refused in (lambda: chat.ask("four", GREEDY), chat.clear):
        with pytest.raises(EngineError, match="under way"):
            refused()
    assert [turn.question for turn in chat.turns] == ["one", "two", "three"]


def test_clear_can_be_undone_until_the_next_message(chat: Conversation, host: DictatedHost):
    answer(chat, host, "one", 0)
    turns = chat.turns
    chat.clear()
    assert (chat.turns, chat.can_undo) == ((), True)
    chat.undo()
    assert (chat.turns, chat.can_undo) == (turns, False)
    chat.clear()
    answer(chat, host, "two", 1)
    assert not chat.can_undo
    chat.undo()
    assert [turn.question for turn in chat.turns] == ["two"]
    assert host.tokenizer.chats[-1] == [{"role": "user", "content": "two"}]


def test_what_cannot_be_answered_says_why_and_is_left_out_of_the_next_prompt(chat: Conversation, host: DictatedHost):
    answer(chat, host, "one", 0)
    chat.ask("word " * MAX_MODEL_LEN, GREEDY)
    ended(chat)
    view = chat.turns[1].answer.view()
    assert view.status == "failed"
    assert (view.error or "").startswith(
        f"the prompt has {MAX_MODEL_LEN + 2} tokens, but the limit is {MAX_MODEL_LEN}: "
    )
    answer(chat, host, "two", 1)
    assert [message["content"] for message in host.tokenizer.chats[-1]] == ["one", "The", "two"]


def test_an_engine_that_fails_ends_the_answer_and_nothing_else(chat: Conversation, host: DictatedHost):
    chat.ask("one", GREEDY)
    host.wait_for(1)
    host.say(0)
    host.unload()
    host.say(end="error", error="the engine failed in a step: boom")
    ended(chat)
    view = chat.turns[0].answer.view()
    assert (view.status, view.error, view.text) == ("failed", "the engine failed in a step: boom", "The")
    chat.ask("two", GREEDY)
    ended(chat)
    assert "no model is loaded (the engine is empty)" in (chat.turns[1].answer.view().error or "")


class HeldRun:
    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self, sink: StatsSink, cancel: threading.Event) -> RunEnd:
        self.begun.set()
        assert self.let_go.wait(PATIENCE_S)
        return RunEnd("finished", time.perf_counter())


def test_answers_and_runs_take_turns(services: FakeServices, chat: Conversation, host: DictatedHost):
    chat.ask("one", GREEDY)
    host.wait_for(1)
    run = HeldRun()
    services.queue.submit_task(1, run, [])
    other = Conversation("other", services)
    other.ask("behind the run", GREEDY)
    assert not run.begun.wait(0.1)
    host.say(0, end="stop")
    ended(chat)
    assert run.begun.wait(PATIENCE_S)
    assert len(host.requests) == 1
    assert other.turns[0].answer.view().status == "waiting"
    stopped = Conversation("stopped", services)
    stopped.ask("never sent", GREEDY)
    stopped.stop()
    ended(stopped)
    assert stopped.turns[0].answer.view().status == "stopped"
    host._show(EngineConfig())  # the run had unloaded it
    run.let_go.set()
    host.wait_for(2)
    host.say(1, end="stop")
    ended(other)
    assert other.turns[0].answer.view().text == " sky"


def test_a_model_is_loaded_behind_answers_and_can_be_cancelled(services: FakeServices, host: DictatedHost):
    playground = Playground(services)
    tiny = EngineConfig().with_overrides({"model.name": "dummy:tiny"})
    chat = playground.begin()
    chat.ask("one", GREEDY)
    host.wait_for(1)
    playground.load(tiny)
    with pytest.raises(EngineError, match="a model is being loaded"):
        playground.load(tiny)
    loading = playground.loading
    assert loading is not None
    assert (loading.model, loading.phase.name) == ("dummy:tiny", "waiting for the engine")
    playground.cancel_loading()
    until(lambda: not playground.is_loading)
    playground.load(tiny)
    host.may_load.clear()
    host.say(0, end="stop")
    until(lambda: playground.loading and playground.loading.phase.total == 4)
    playground.cancel_loading()
    until(lambda: playground.loading is None)
    assert host.loaded == []
    host.may_load.set()
    playground.load(tiny)
    until(lambda: playground.loading is None)
    assert host.loaded == [tiny]
    host.load_error = ModelError("its files are damaged")
    playground.load(tiny)
    until(lambda: not playground.is_loading)
    assert playground.loading is not None
    assert playground.loading.error == "its files are damaged"
    playground.load(EngineConfig().with_overrides({"model.name": "nowhere"}))
    until(lambda: not playground.is_loading)
    assert "nowhere" in (playground.loading.error or "")


def test_old_conversations_are_forgotten_but_for_those_that_are_answered(services: FakeServices, host: DictatedHost):
    playground = Playground(services)
    busy = playground.begin()
    busy.ask("one", GREEDY)
    idle = playground.begin()
    looked_at = playground.begin()
    for _ in range(MAX_KEPT - 3):
        playground.begin()
    assert playground.find(looked_at.chat_id) is looked_at
    playground.begin()
    assert playground.find(idle.chat_id) is None
    assert playground.find(looked_at.chat_id) is looked_at
    assert playground.find(busy.chat_id) is busy
    assert playground.find(None) is None


def test_tokens_keep_their_origins_and_the_export_has_them(chat: Conversation, host: DictatedHost):
    chat.ask("why", SAMPLED)
    host.wait_for(1)
    host.say(0, origins=["plain"])
    host.say(1, 2, 6, origins=["accepted", "accepted", "recovered"])
    host.say(3, END, origins=["accepted", "bonus"], end="stop")
    ended(chat)
    origins = ["plain", "accepted", "accepted", "recovered", "accepted", "bonus"]
    tokens = chat.turns[0].answer.view().tokens
    assert [token.origin for token in tokens] == origins
    html = playground_text.answer_html(tokens, show_tokens=False)
    assert '<span class="accepted" title="token 1, accepted"> sky</span>' in html
    assert '<span class="recovered" title="token 6, recovered"> &lt;b&gt;bold&lt;/b&gt;</span>' in html
    assert "&lt;|end|&gt;" not in html
    assert "&lt;|end|&gt;" in playground_text.answer_html(tokens, show_tokens=True)
    legend = playground_text.legend_html(tokens)
    for name, number in {"accepted": 3, "recovered": 1, "bonus": 1, "plain": 1}.items():
        assert f"</i>{name} <b>{number}</b>" in legend
    document = json.loads(playground_export.text(chat.chat_id, chat.turns))
    (turn,) = document["turns"]
    assert (document["format"], turn["question"], turn["system_prompt"]) == ("servelab-conversation", "why", None)
    assert turn["sampling"] == SAMPLED.sampling.to_dict()
    assert (turn["answer"]["origins"], turn["answer"]["token_ids"]) == (origins, [0, 1, 2, 6, 3, END])
    assert turn["answer"]["text"] == "The sky is <b>bold</b> blue"


def test_the_export_marks_what_synthetic_drafts_made(chat: Conversation, host: DictatedHost):
    """The answers of such an engine, and the conversation that has one."""
    answer(chat, host, "why", 0, 1)
    assert "synthetic" not in playground_export.document(chat.chat_id, chat.turns)
    settings = {"model.name": "dummy:tiny", "speculative.method": "synthetic", "speculative.synthetic_acceptance": 0.5}
    host.load(EngineConfig().with_overrides(settings), lambda phase: None)
    answer(chat, host, "and now", 2, 3)
    document = json.loads(playground_export.text(chat.chat_id, chat.turns))
    assert document["synthetic"] is True
    assert [turn.get("synthetic") for turn in document["turns"]] == [None, True]
    assert [turn["model"] for turn in document["turns"]] == [EngineConfig().model.name, "dummy:tiny"]


def test_without_speculation_there_are_no_colours_and_the_text_is_as_it_is(chat: Conversation, host: DictatedHost):
    answer(chat, host, "why", 0, 5, 6)
    tokens = chat.turns[0].answer.view().tokens
    assert playground_text.answer_html(tokens, show_tokens=False) == (
        '<div class="sl-chat">The&#10; &lt;b&gt;bold&lt;/b&gt;</div>'
    )
    assert "↵&#10;" in playground_text.answer_html(tokens, show_tokens=True)
    assert playground_export.document("x", chat.turns)["turns"][0]["answer"]["origins"] is None


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def test_an_answer_is_what_the_engine_says_to_anybody(services: FakeServices, tiny_llama: Path):
    """Random bytes: many a character comes in parts, or never."""
    host = EngineHost()
    queue = RunQueue(host)  # type: ignore[arg-type]
    services.fake_host, services.fake_queue = host, queue  # type: ignore[assignment]
    try:
        config = EngineConfig().with_overrides(
            {"model.name": str(tiny_llama), "model.device": "cpu", "model.max_model_len": 160, "cache.num_blocks": 32}
        )
        host.load(config)
        chat = Conversation("tiny", services)
        settings = ChatSettings("Be brief.", SamplingParams(temperature=1.0, seed=3, max_tokens=1000, ignore_eos=True))
        chat.ask("Why?", settings)
        ended(chat)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        prompt, events, over = host.tokenizer.encode_chat(messages), list[StreamEvent](), threading.Event()

        def on_event(event: StreamEvent) -> None:
            events.append(event)
            if event.finish_reason:
                over.set()

        host.submit("by hand", prompt, settings.sampling, on_event)
        assert over.wait(PATIENCE_S)
        view = chat.turns[0].answer.view()
        token_ids = [token_id for event in events for token_id in event.token_ids]
        assert [token.token_id for token in view.tokens] == token_ids
        assert view.text == "".join(event.text for event in events) == host.tokenizer.decode(token_ids)
        assert view.context_is_full
        assert (view.num_prompt_tokens, view.num_context_tokens) == (len(prompt), 160)
        chat.ask("More?", settings)
        ended(chat)
        assert "prompt and output together may have 160" in (chat.turns[1].answer.view().error or "")
    finally:
        queue.close()
        host.close()
