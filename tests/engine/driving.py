"""Drives an `EngineHost` the way a client does and collects what it delivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")
A = TypeVar("A", bound="Answer")


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    events: list[StreamEvent] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, event: StreamEvent) -> None:
        assert not self.done.is_set(), "an event after the last one"
        self.events.append(event)
        self.token_ids.extend(event.token_ids)
        self.text += event.text
        if event.finish_reason is not None:
            self.done.set()

    @property
    def last(self) -> StreamEvent:
        assert self.done.wait(PATIENCE_S), "no last event"
        return self.events[-1]

    @property
    def finish_reason(self) -> str | None:
        return self.last.finish_reason


@dataclass
class Pausing(Answer):
    """Holds the engine's thread at its first event, so that what is asked for next finds the request under way."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def take(self, event: StreamEvent) -> None:
        super().take(event)
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S), "nobody lets the engine go on"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is put on the host's queue within comes before the step after the first event."""
        assert self.begun.wait(PATIENCE_S), "no first event"
        try:
            yield
        finally:
            self.go_on.set()


@contextmanager
def held(host: EngineHost) -> Iterator[None]:
    """Keep the engine's thread busy: all that is asked for within reaches it at once, in its order, between two steps."""
    begun, go_on = threading.Event(), threading.Event()
    host._put(lambda: begun.set() or go_on.wait(PATIENCE_S))
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def ask(host: EngineHost, function: Callable[[], T]) -> Future[T]:
    """Call `function`, which waits for the host's thread, on another one; what it asks a held host lies on its queue then."""
    before, answer = host._commands.qsize(), Future[T]()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    until(lambda: host._commands.qsize() > before or answer.done())
    return answer


def between_steps(host: EngineHost, answer: Pausing, function: Callable[[], T]) -> T:
    """What `function` returns or raises when the host's thread comes to it while `answer` is under way, with a token out."""
    with answer.paused():
        asked = ask(host, function)
    return asked.result(PATIENCE_S)


def submit(host: EngineHost, request_id: str, prompt: Sequence[int], **sampling: Any) -> Answer:
    return submit_to(Answer(), host, request_id, prompt, **sampling)


def submit_to(answer: A, host: EngineHost, request_id: str, prompt: Sequence[int], **sampling: Any) -> A:
    host.submit(request_id, list(prompt), SamplingParams(**sampling), answer.take)
    return answer


def answers(host: EngineHost, prompts: Mapping[str, Sequence[int]], **sampling: Any) -> dict[str, Answer]:
    """Submit all at once and wait for all; afterwards no block is held and the pool is whole."""
    with held(host):
        collected = {key: submit(host, key, prompt, **sampling) for key, prompt in prompts.items()}
    for answer in collected.values():
        assert answer.last is not None
    check_idle(host)
    return collected


def tokens(host: EngineHost, prompts: Mapping[str, Sequence[int]], **sampling: Any) -> dict[str, list[int]]:
    return {key: answer.token_ids for key, answer in answers(host, prompts, **sampling).items()}


def check_idle(host: EngineHost) -> None:
    """Block conservation once nothing runs; read on the host's thread, where the pool lives."""

    def check() -> None:
        manager = host._require().engine.scheduler.kv_cache_manager
        manager.check_integrity()
        assert manager.pool.num_referenced_blocks == 0
        assert not host._listeners

    host._call(check)


def config_of(model: object, **overrides: Any) -> EngineConfig:
    """Overrides with `__` for the dot: `cache__num_blocks=8`. Whoever speculates drafts whatever it is worth."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    always = {"model.name": str(model), "model.device": "cpu", "speculative.adaptive": False}
    return EngineConfig().with_overrides(always | dotted)
