"""The Playground page: a conversation that lives on the server, whatever its viewers do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from streamlit.testing.v1 import AppTest

from app.components import playground_settings, widgets
from app.components.playground_chat import Conversation
from app.components.playground_store import playground_of
from backend.config import EngineConfig
from backend.errors import ModelError
from backend.experiments.run_queue import RunQueue
from backend.metrics.stats import RunEnd, StatsSink
from tests.app.chat_host import DictatedHost
from tests.app.pages import page, press, words
from tests.app.stored_runs import FakeServices
from tests.waiting import PATIENCE_S, until


def serve(services: FakeServices, state: str = "ready") -> DictatedHost:
    """Put a host whose answers are dictated, and a real queue of runs, behind the pages."""
    host = services.fake_host = DictatedHost(state)  # type: ignore[assignment]
    services.fake_queue = RunQueue(host)  # type: ignore[assignment]
    return host


@pytest.fixture
def host(services: FakeServices) -> Iterator[DictatedHost]:
    host = serve(services)
    yield host
    services.queue.close()


def address(app: AppTest) -> str:
    """The conversation that the page's address names."""
    value = app.query_params["chat"]
    return value if isinstance(value, str) else value[0]


def conversation(services: FakeServices, app: AppTest) -> Conversation:
    chat = playground_of(services).find(address(app))
    assert chat is not None
    return chat


def say(app: AppTest, text: str) -> None:
    app.chat_input[0].set_value(text).run()
    assert not app.exception, app.exception[0].message


def html(app: AppTest) -> str:
    return "\n".join(element.proto.body for element in app.get("html"))


def ended(services: FakeServices, app: AppTest) -> None:
    chat = conversation(services, app)
    until(lambda: chat.under_way is None)
    app.run()
    assert not app.exception, app.exception[0].message


def labels(app: AppTest) -> list[str]:
    return [button.label for button in app.button]


def test_without_a_model_one_click_loads_the_default(services: FakeServices):
    host = serve(services, "empty")
    app = page("playground")
    assert "No model is loaded" in words(app)
    assert (app.chat_input[0].disabled, app.chat_input[0].placeholder) == (True, "Load a model first")
    host.may_load.clear()
    app.button(key="playground-load-0").click().run()
    assert app.chat_input[0].placeholder == "Wait for the model"
    assert "Cancel" in labels(app)
    host.may_load.set()
    until(lambda: host.loaded)
    until(lambda: playground_of(services).loading is None)
    app.run()
    assert host.loaded == [EngineConfig()]
    assert "smollm2-135m" in words(app)
    assert "context 40 tokens" in words(app)
    assert not app.chat_input[0].disabled
    services.queue.close()


def test_the_engine_of_the_run_page_is_offered_too(services: FakeServices):
    host = serve(services, "empty")
    host.load_error = ModelError("model.safetensors is truncated")
    app = page()
    app.selectbox(key=widgets.key_of("model.name")).set_value("dummy:tiny")
    app.number_input(key=widgets.key_of("scheduler.max_num_seqs")).set_value(2)
    app.selectbox(key=widgets.key_of("speculative.method")).set_value("ngram").run()
    app.switch_page("app_pages/playground.py").run()
    app.button(key="playground-load-1").click().run()
    until(lambda: not playground_of(services).is_loading)
    app.run()
    assert "dummy:tiny could not be loaded: model.safetensors is truncated" in words(app)
    host.load_error = None
    app.button(key="playground-load-1").click().run()
    until(lambda: host.loaded)
    asked = {"model.name": "dummy:tiny", "scheduler.max_num_seqs": 2, "speculative.method": "ngram"}
    assert host.loaded == [EngineConfig().with_overrides(asked)]
    until(lambda: not playground_of(services).is_loading)
    app.run()
    assert "context 40 tokens, ngram drafts" in words(app)
    services.queue.close()


def test_an_answer_streams_and_says_how_fast(services: FakeServices, host: DictatedHost):
    app = page("playground")
    say(app, "why *so* <i>blue</i>")
    host.wait_for(1)
    app.run()
    assert "why *so* &lt;i&gt;blue&lt;/i&gt;" in html(app)
    assert (app.chat_input[0].disabled, "Stop" in labels(app), "Regenerate" in labels(app)) == (True, True, False)
    assert "Reading 3 tokens of prompt" in words(app)
    host.say(0)
    app.run()
    assert 'The<b class="caret"></b>' in html(app)
    assert "– tok/s" in words(app)
    host.say(1, end="length")
    ended(services, app)
    assert '<div class="sl-chat">The sky</div>' in html(app)
    said = words(app)
    assert "2 tokens, cut at max tokens · context 5 of 40 · smollm2-135m · greedy" in said
    assert "TTFT" in said
    assert not app.chat_input[0].disabled
    assert app.chat_input[0].placeholder == "Ask something"


def test_the_address_is_the_conversation_for_every_tab_and_after_a_reload(services: FakeServices, host: DictatedHost):
    app = page("playground")
    chat_id = address(app)
    app.number_input(key=playground_settings.key_of(conversation(services, app), "temperature")).set_value(0.5).run()
    say(app, "why")
    host.wait_for(1)
    host.say(0)
    other = page("playground", chat=chat_id)
    assert 'The<b class="caret"></b>' in html(other)
    assert other.number_input(key=f"playground:{chat_id}:temperature").value == 0.5
    press(other, "Stop")
    ended(services, app)
    assert host.aborted == [host.requests[0].request_id]
    assert "1 token, stopped" in words(app)
    app.switch_page("app_pages/run.py").run()
    app.query_params.clear()
    app.switch_page("app_pages/playground.py").run()
    assert address(app) == chat_id
    assert address(page("playground")) != chat_id


def test_an_address_from_before_a_restart_says_so(services: FakeServices, host: DictatedHost):
    app = page("playground", chat="gone")
    assert "not here any more" in words(app)
    assert address(app) != "gone"
    app.run()
    assert "not here any more" not in words(app)


def test_the_last_message_is_edited_and_asked_again(services: FakeServices, host: DictatedHost):
    app = page("playground")
    say(app, "why")
    host.wait_for(1)
    host.say(0, end="stop")
    ended(services, app)
    press(app, "Regenerate")
    host.wait_for(2)
    host.say(1, end="stop")
    ended(services, app)
    press(app, "Edit")
    assert "Regenerate" not in labels(app)
    app.text_area[-1].set_value("why not")
    press(app, "Send")
    host.wait_for(3)
    host.say(2, end="stop")
    ended(services, app)
    chat = conversation(services, app)
    assert [(turn.question, turn.answer.view().text) for turn in chat.turns] == [("why not", " is")]
    press(app, "Edit")
    press(app, "Keep as it was")
    assert len(host.requests) == 3
    assert "Regenerate" in labels(app)


def test_clear_is_undone_by_one_click(services: FakeServices, host: DictatedHost):
    app = page("playground")
    press(app, "Why is the sky blue?")
    host.wait_for(1)
    host.say(0, end="stop")
    ended(services, app)
    press(app, "Clear")
    assert '<div class="sl-chat">The</div>' not in html(app)
    press(app, "Undo clear")
    assert '<div class="sl-chat">The</div>' in html(app)


def test_settings_reach_the_engine_and_a_wrong_one_is_named(services: FakeServices, host: DictatedHost):
    app = page("playground")
    chat_id = address(app)
    values = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "seed": 3}
    for name, value in values.items():
        app.number_input(key=f"playground:{chat_id}:{name}").set_value(value)
    app.text_area(key=f"playground:{chat_id}:system").set_value("Be brief.").run()
    say(app, "why")
    host.wait_for(1)
    assert {name: getattr(host.requests[0].sampling, name) for name in values} == values
    assert host.tokenizer.chats[0][0] == {"role": "system", "content": "Be brief."}
    host.say(0, end="stop")
    ended(services, app)
    assert "temperature 0.700, seed 3" in words(app)
    app.number_input(key=f"playground:{chat_id}:top_p").set_value(1.5).run()
    assert "top_p = 1.5" in words(app)
    assert app.chat_input[0].disabled
    assert app.button(key="playground-regenerate").disabled


def test_what_is_refused_is_not_lost(services: FakeServices, host: DictatedHost):
    app = page("playground")
    chat = conversation(services, app)
    chat.ask("from another tab", chat.settings)  # this one's input is still open
    app.chat_input[0].set_value("my long message").run()
    assert "Not sent: an answer is under way: stop it, or wait for its end. Your message was: my long message" in words(
        app
    )


def test_while_a_run_goes_on_an_answer_waits_and_says_for_what(services: FakeServices, host: DictatedHost):
    let_go = threading.Event()

    def run(sink: StatsSink, cancel: threading.Event) -> RunEnd:
        assert let_go.wait(PATIENCE_S)
        return RunEnd("finished", time.perf_counter())

    host.unload = lambda: None  # it keeps its model
    services.queue.submit_task(7, run, [])
    until(lambda: not services.queue.queued())
    app = page("playground")
    assert "The engine is busy with run #7" in words(app)
    say(app, "why")
    assert "Waiting for run #7" in words(app)
    assert not host.requests
    let_go.set()
    host.wait_for(1)
    host.say(0, end="stop")
    ended(services, app)
    assert '<div class="sl-chat">The</div>' in html(app)
    assert "run #7" not in words(app)


def test_failures_are_one_message_and_the_conversation_stays(services: FakeServices, host: DictatedHost):
    app = page("playground")
    say(app, "word " * 50)
    ended(services, app)
    assert [error.value.replace("\\", "") for error in app.error] == [
        "the prompt has 50 tokens, but the limit is 40: clear the conversation, or shorten the message. "
        "This message is not part of what the model sees next."
    ]
    say(app, "word " * 38)
    host.wait_for(1)
    host.say(0, 1, end="length")
    ended(services, app)
    assert "The context of 40 tokens is full" in words(app)
    say(app, "why")
    ended(services, app)
    assert "the prompt has 41 tokens, but the limit is 40: clear the conversation, or shorten the message" in words(app)
    host.info, host.state = None, "failed"
    app.run()
    assert "The engine failed and was unloaded. The conversation is kept" in words(app)
    assert '<div class="sl-chat">The sky</div>' in html(app)
    assert app.button(key="playground-load-0").label == "Load smollm2\\-135m"


def test_colours_come_with_origins_and_boundaries_when_asked_for(services: FakeServices, host: DictatedHost):
    app = page("playground")
    say(app, "why")
    host.wait_for(1)
    host.say(0, 1, origins=["accepted", "recovered"], end="stop")
    ended(services, app)
    assert '<span class="accepted" title="token 0, accepted">The</span>' in html(app)
    assert 'class="sl-origins"' in html(app)
    say(app, "and")
    host.wait_for(2)
    host.say(2, end="stop")
    ended(services, app)
    assert '<div class="sl-chat"> is</div>' in html(app)
    app.toggle(key="playground-tokens").set_value(True).run()
    assert '<span class="plain" title="token 2"> is</span>' in html(app)
