"""An engine host whose answers tests dictate, token by token, and a tokenizer with a word for each id."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from backend.config import EngineConfig
from backend.errors import EngineError, RequestError
from backend.metrics.stats import MemoryUse, Phase
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from tests.waiting import until

WORDS = ("The", " sky", " is", " blue", ".", "\n", " <b>bold</b>", " why")
END = len(WORDS)  # a special token: it has a name and no text
MAX_MODEL_LEN = 40


class Info(NamedTuple):
    resolved_config: EngineConfig
    model: dict[str, Any]
    load: dict[str, Any]
    notices: tuple[str, ...]


class Submitted(NamedTuple):
    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    on_event: Callable[[StreamEvent], None]
    arrival_time: float


class WordStream:
    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(WORDS[token_id] for token_id in token_ids if token_id < END)

    def flush(self) -> str:
        return ""


class WordTokenizer:
    """A prompt has as many tokens as its messages have words."""

    vocab_size = len(WORDS) + 1
    eos_token_ids = frozenset({END})

    def __init__(self) -> None:
        self.chats: list[list[dict[str, str]]] = []

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.chats.append(messages)
        return [0] * sum(len(message["content"].split()) for message in messages)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        name = "" if skip_special_tokens else "<|end|>"
        return "".join(name if token_id == END else WORDS[token_id] for token_id in token_ids)

    def new_stream(self) -> WordStream:
        return WordStream()


class DictatedHost:
    """A loaded engine from the start, unless `state` is "empty"."""

    def __init__(self, state: str = "ready") -> None:
        self.state = state
        self.info: Info | None = None
        self.tokenizer = WordTokenizer()
        self.loaded: list[EngineConfig] = []
        self.load_error: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        self.requests: list[Submitted] = []
        self.aborted: list[str] = []
        if state == "ready":
            self._show(EngineConfig())

    def load(self, config: EngineConfig, on_phase: Callable[[Phase], None]) -> Info:
        while not self.may_load.wait(0.01):
            on_phase(Phase("loading", 1, 4, "MiB"))
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(config)
        return self._show(config)

    def submit(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        on_event: Callable[[StreamEvent], None],
        arrival_time: float | None = None,
    ) -> None:
        if self.info is None:
            raise EngineError("no model is loaded")
        if len(token_ids) >= MAX_MODEL_LEN:
            raise RequestError(f"the prompt has {len(token_ids)} tokens, but the limit is {MAX_MODEL_LEN}")
        self.requests.append(Submitted(request_id, token_ids, sampling, on_event, arrival_time or 0.0))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        for request in self.requests:
            if request.request_id == request_id:
                request.on_event(StreamEvent(request_id, time.perf_counter(), (), "", "abort"))

    def say(
        self, *token_ids: int, origins: list[str] | None = None, end: str | None = None, error: str | None = None
    ) -> None:
        """Let the last request have these tokens in one event, which ends it with `end`."""
        request = self.requests[-1]
        event = StreamEvent(request.request_id, time.perf_counter(), token_ids, "", end, error)  # type: ignore[arg-type]
        event.origins = origins
        request.on_event(event)

    def wait_for(self, num_requests: int) -> None:
        until(lambda: len(self.requests) == num_requests)

    # What a run asks of it.

    def unload(self) -> None:
        self.info, self.state = None, "empty"

    def execute(self, function: Callable[[], Any]) -> Any:
        return function()

    def set_sink(self, sink: Any) -> None: ...

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0, None, None)

    def reset_peak_memory(self) -> None: ...

    def reset_prefix_cache(self) -> int:
        return 0

    def num_cached_tokens(self) -> int:
        return 0

    def close(self) -> None: ...

    def _show(self, config: EngineConfig) -> Info:
        self.info = Info(config.resolve(device="cpu", max_model_len=MAX_MODEL_LEN), {}, {}, ())
        self.state = "ready"
        return self.info
