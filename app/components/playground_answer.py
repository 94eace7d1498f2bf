"""An answer of a conversation while it comes: tokens, text, times. The engine's thread writes, any number of pages read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Literal, NamedTuple

from backend.core.speculation import is_synthetic
from backend.metrics.stats import tpot_ms_between
from backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from backend.config import EngineConfig
    from backend.detokenizer import TokenStream
    from backend.tokenizer import Tokenizer
    from backend.workload.targets import StreamEvent

PLAIN = "plain"

AnswerStatus = Literal["waiting", "answering", "finished", "stopped", "failed"]
_STATUS: dict[str, AnswerStatus] = {"stop": "finished", "length": "finished", "abort": "stopped", "error": "failed"}


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What is asked along with a question. An empty system prompt leaves it to the model's chat template."""

    system_prompt: str = ""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256))


class Token(NamedTuple):
    """`text` is what became certain with it: a character of several tokens is the last one's. `name` is a special token's."""

    token_id: int
    text: str
    origin: str  # "accepted", "recovered", "bonus" or "plain"
    name: str = ""


@dataclass(frozen=True, slots=True)
class AnswerView:
    """An answer at one moment. Times are `time.perf_counter()` seconds; None: not yet, or it never came to that."""

    status: AnswerStatus
    settings: ChatSettings
    tokens: tuple[Token, ...]
    model: str | None
    is_synthetic: bool  # by an engine that accepts drafts at a set rate: its tokens mean nothing
    max_model_len: int | None
    num_prompt_tokens: int | None
    arrival_time: float | None  # at the engine, when its turn had come
    first_time: float | None
    last_time: float | None  # of the last token so far
    finish_reason: str | None
    error: str | None

    @property
    def is_over(self) -> bool:
        return self.status not in ("waiting", "answering")

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def ttft_ms(self) -> float | None:
        if self.first_time is None or self.arrival_time is None:
            return None
        return (self.first_time - self.arrival_time) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        if self.first_time is None or self.last_time is None:
            return None
        return tpot_ms_between(self.first_time, self.last_time, len(self.tokens))

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first: 1 / TPOT. None where all came at once."""
        return 1e3 / self.tpot_ms if self.tpot_ms else None

    @property
    def num_context_tokens(self) -> int | None:
        """Prompt and output so far."""
        return None if self.num_prompt_tokens is None else self.num_prompt_tokens + len(self.tokens)

    @property
    def context_is_full(self) -> bool:
        """Whether the context has ended it, and not `max_tokens`."""
        if self.finish_reason != "length" or self.num_context_tokens is None or self.max_model_len is None:
            return False
        return self.num_context_tokens >= self.max_model_len


class Answer:
    """Args:
    request_id: its name at the engine.
    settings: with the seed that this answer is drawn with.
    """

    def __init__(self, request_id: str, settings: ChatSettings) -> None:
        self.request_id = request_id
        self.settings = settings
        self.stop_asked = threading.Event()
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._status: AnswerStatus = "waiting"
        self._tokens: list[Token] = []
        self._tokenizer: Tokenizer | None = None
        self._stream: TokenStream | None = None
        self._model: str | None = None
        self._is_synthetic = False
        self._max_model_len: int | None = None
        self._num_prompt_tokens: int | None = None
        self._arrival_time: float | None = None
        self._first_time: float | None = None
        self._last_time: float | None = None
        self._finish_reason: str | None = None
        self._error: str | None = None

    def begin(self, tokenizer: Tokenizer, config: EngineConfig, num_prompt_tokens: int, arrival_time: float) -> None:
        """Its turn has come: it is about to be submitted.

        Args:
            config: of the engine, as it runs.
        """
        with self._lock:
            self._status = "answering"
            self._tokenizer, self._stream = tokenizer, tokenizer.new_stream()
            self._model, self._max_model_len = config.model.name, config.model.max_model_len
            self._is_synthetic = is_synthetic(config.to_dict())
            self._num_prompt_tokens, self._arrival_time = num_prompt_tokens, arrival_time

    def on_event(self, event: StreamEvent) -> None:
        """Take a delivery, on the target's thread."""
        origins = chain(getattr(event, "origins", None) or (), repeat(PLAIN))
        with self._lock:
            for token_id, origin in zip(event.token_ids, origins, strict=False):
                self._tokens.append(self._token(token_id, origin))
            if event.token_ids:
                self._last_time = event.time
                if self._first_time is None:
                    self._first_time = event.time
        if event.finish_reason is not None:
            self._end(_STATUS[event.finish_reason], event.finish_reason, event.error)

    def fail(self, error: str) -> None:
        """It cannot be given, or not go on."""
        self._end("failed", "error", error)

    def stop_waiting(self) -> None:
        """It was stopped before its turn had come."""
        self._end("stopped", "abort", None)

    def view(self) -> AnswerView:
        with self._lock:
            return AnswerView(
                status=self._status,
                settings=self.settings,
                tokens=tuple(self._tokens),
                model=self._model,
                is_synthetic=self._is_synthetic,
                max_model_len=self._max_model_len,
                num_prompt_tokens=self._num_prompt_tokens,
                arrival_time=self._arrival_time,
                first_time=self._first_time,
                last_time=self._last_time,
                finish_reason=self._finish_reason,
                error=self._error,
            )

    def _token(self, token_id: int, origin: str) -> Token:
        assert self._stream is not None
        assert self._tokenizer is not None
        text = self._stream.push([token_id])
        if text or self._tokenizer.decode([token_id]):
            return Token(token_id, text, origin)
        return Token(token_id, text, origin, self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _end(self, status: AnswerStatus, finish_reason: str, error: str | None) -> None:
        with self._lock:
            rest = self._stream.flush() if self._stream is not None else ""
            if rest and self._tokens:
                last = self._tokens[-1]
                self._tokens[-1] = last._replace(text=last.text + rest)
            self._status, self._finish_reason, self._error = status, finish_reason, error
        self.ended.set()
