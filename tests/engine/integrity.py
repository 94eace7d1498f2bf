"""Sees to it that no test leaves an engine with a KV cache that does not hold together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import pytest

from backend.engine.engine_host import EngineHost
from backend.engine.llm_engine import LLMEngine
from backend.errors import EngineError


class MadeEngines:
    """All engines and hosts that are alive and were made since `recording` began.

    Attributes:
        broken: engines that a test has damaged on purpose.
    """

    def __init__(self) -> None:
        self.broken: WeakSet[LLMEngine] = WeakSet()
        self._engines: WeakSet[LLMEngine] = WeakSet()
        self._hosts: WeakSet[EngineHost] = WeakSet()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for made, into in ((LLMEngine, self._engines), (EngineHost, self._hosts)):
                patch.setattr(made, "__init__", _noting(made.__init__, into))
            yield

    def check(self) -> None:
        """Raise `RuntimeError` for an engine whose blocks, references and holders do not agree."""
        left = set(self._engines - self.broken)
        for host in list(self._hosts):
            # Its thread may still be at work on what a test did not wait for, so it is the one that looks.
            with suppress(EngineError):
                host._call(lambda host=host: self._check_loaded(host, left))
            if host._closing:
                host._thread.join(60)
        for engine in left:
            engine.scheduler.kv_cache_manager.check_integrity()

    def _check_loaded(self, host: EngineHost, left: set[LLMEngine]) -> None:
        if host._loaded is not None and host._loaded.engine in left:
            left.remove(host._loaded.engine)
            host._loaded.engine.scheduler.kv_cache_manager.check_integrity()


def _noting(init: Any, into: WeakSet[Any]) -> Any:
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        into.add(self)

    return noting
