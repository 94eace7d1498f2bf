"""Conversations: they belong to the process, not to a page. A rerun, another tab or a lost connection changes nothing."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from app.components.playground_answer import Answer, ChatSettings
from app.services import Services
from backend.errors import EngineError, RequestError, ServeLabError

if TYPE_CHECKING:
    from backend.engine.engine_host import EngineHost

logger = logging.getLogger(__name__)

RETRY_S = 0.05  # between two looks at whether the engine is free

_request_numbers = count()


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; `attempt` counts how often this question has been answered anew."""

    question: str
    answer: Answer
    attempt: int = 0


class Conversation:
    """Thread-safe.

    Attributes:
        settings: of the last question, or as somebody has set them since: what a page starts from.
        version: another one after every change but those of an answer under way.
    """

    def __init__(self, chat_id: str, services: Services) -> None:
        self.chat_id = chat_id
        self.settings = ChatSettings()
        self.version = 0
        self._services = services
        self._lock = threading.Lock()
        self._turns: tuple[Turn, ...] = ()
        self._cleared: tuple[Turn, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._turns

    @property
    def under_way(self) -> Turn | None:
        """The turn whose answer has not ended."""
        turns = self._turns
        return turns[-1] if turns and not turns[-1].answer.ended.is_set() else None

    @property
    def can_undo(self) -> bool:
        """Whether there is something that `clear` has taken away."""
        return bool(self._cleared)

    def ask(self, question: str, settings: ChatSettings, *, in_place_of: int | None = None) -> None:
        """Add a turn and return at once; the answer comes when no run is queued or under way.

        Asked again in the same words, a sampled answer is drawn with the next seed.

        Args:
            in_place_of: index of the turn that is asked anew, which must be the last.

        Raises:
            RequestError: the question is empty, or the turn to be replaced is not the last any more.
            EngineError: an answer is under way.
        """
        if not question.strip():
            raise RequestError("the message is empty: it must hold at least one character")
        with self._lock:
            self._check_idle()
            kept, attempt = self._turns, 0
            if in_place_of is not None:
                if in_place_of != len(kept) - 1:
                    raise RequestError(
                        "the conversation has gone on meanwhile: only its last message can be asked again"
                    )
                kept, last = kept[:-1], kept[-1]
                attempt = last.attempt + 1 if last.question == question else 0
            answer = Answer(f"chat-{self.chat_id}-{next(_request_numbers)}", _with_attempt(settings, attempt))
            self.settings = settings
            self._turns, self._cleared = (*kept, Turn(question, answer, attempt)), ()
            self.version += 1
        messages = _messages(kept, question, settings)
        threading.Thread(
            target=self._serve, args=(answer, messages), name=f"servelab-{answer.request_id}", daemon=True
        ).start()

    def stop(self) -> None:
        """End the answer under way, if there is one; what has come of it stays."""
        turn = self.under_way
        if turn is not None:
            turn.answer.stop_asked.set()
            self._services.host.abort(turn.answer.request_id)

    def clear(self) -> None:
        """Take all turns away, until `undo` or the next question. Raises `EngineError` while an answer is under way."""
        with self._lock:
            self._check_idle()
            self._turns, self._cleared = (), self._turns
            self.version += 1

    def undo(self) -> None:
        """Bring back what `clear` has taken away."""
        with self._lock:
            if self._cleared:
                self._turns, self._cleared = self._cleared, ()
                self.version += 1

    def _check_idle(self) -> None:
        if self.under_way is not None:
            raise EngineError("an answer is under way: stop it, or wait for its end")

    def _serve(self, answer: Answer, messages: list[dict[str, str]]) -> None:
        """From the wait for the engine to the last token, on a thread of its own. Whatever goes wrong ends the answer."""
        try:
            queue = self._services.queue
            while not queue.try_borrow():
                if answer.stop_asked.wait(RETRY_S):
                    answer.stop_waiting()
                    return
            try:
                _answer(self._services.host, answer, messages)
            finally:
                queue.give_back()
        except ServeLabError as error:
            answer.fail(str(error))
        except Exception as error:
            logger.exception("an answer failed")
            answer.fail(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self.version += 1


def _answer(host: EngineHost, answer: Answer, messages: list[dict[str, str]]) -> None:
    """Let the loaded engine answer, and wait for the end of it."""
    info = host.info
    if info is None:
        raise EngineError(f"no model is loaded (the engine is {host.state}): load one, then ask again")
    arrival_time = time.perf_counter()
    tokenizer = host.tokenizer
    token_ids = tokenizer.encode_chat(messages)
    answer.begin(tokenizer, info.resolved_config, len(token_ids), arrival_time)
    try:
        host.submit(answer.request_id, token_ids, answer.settings.sampling, answer.on_event, arrival_time)
    except RequestError as error:
        max_model_len = info.resolved_config.model.max_model_len
        if max_model_len is None or len(token_ids) < max_model_len:
            raise
        raise RequestError(f"{error}: clear the conversation, or shorten the message") from None
    if answer.stop_asked.is_set():  # by somebody who came before the request did
        host.abort(answer.request_id)
    answer.ended.wait()


def _with_attempt(settings: ChatSettings, attempt: int) -> ChatSettings:
    sampling = settings.sampling
    if not attempt or sampling.temperature == 0:
        return settings
    return replace(settings, sampling=sampling.model_copy(update={"seed": (sampling.seed + attempt) % 2**63}))


def _messages(turns: tuple[Turn, ...], question: str, settings: ChatSettings) -> list[dict[str, str]]:
    """The conversation as a chat template takes it. A turn that has no answer is left out: templates want them in turns."""
    system = settings.system_prompt.strip()
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        if text := turn.answer.view().text:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": text}]
    return [*messages, {"role": "user", "content": question}]
