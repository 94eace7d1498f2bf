"""Drives an `EngineHost` the way a client does and collects what it delivers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent


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
        assert self.done.wait(60), "no last event"
        return self.events[-1]

    @property
    def finish_reason(self) -> str | None:
        return self.last.finish_reason


def submit(host: EngineHost, request_id: str, prompt: Sequence[int], **sampling: Any) -> Answer:
    answer = Answer()
    host.submit(request_id, list(prompt), SamplingParams(**sampling), answer.take)
    return answer


def answers(host: EngineHost, prompts: Mapping[str, Sequence[int]], **sampling: Any) -> dict[str, Answer]:
    """Submit all at once and wait for all; afterwards no block is held and the pool is whole."""
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
    """Overrides with `__` for the dot: `cache__num_blocks=8`."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return EngineConfig().with_overrides({"model.name": str(model), "model.device": "cpu"} | dotted)
