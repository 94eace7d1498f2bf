"""The conversations of this process, and the model that is loaded for them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from app.components.playground_chat import RETRY_S, Conversation
from app.services import Services, check_engine
from backend.config import EngineConfig
from backend.errors import EngineError, ServeLabError
from backend.metrics.stats import Phase

logger = logging.getLogger(__name__)

MAX_KEPT = 200  # conversations; the one nobody has looked at for longest goes first

_lock = threading.Lock()
_playground: Playground | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """A model on its way, or why it did not come."""

    model: str
    phase: Phase
    error: str | None = None


class _Cancelled(Exception):
    """Leaves a download or a load from within its progress callback."""


class Playground:
    """Thread-safe."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._lock = threading.Lock()
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._loading: Loading | None = None
        self._cancel = threading.Event()

    @property
    def loading(self) -> Loading | None:
        """What is being loaded, or, with its error, what could not be."""
        return self._loading

    @property
    def is_loading(self) -> bool:
        loading = self._loading
        return loading is not None and loading.error is None

    def find(self, chat_id: str | None) -> Conversation | None:
        with self._lock:
            if chat_id in self._conversations:
                self._conversations.move_to_end(chat_id)
                return self._conversations[chat_id]
        return None

    def begin(self) -> Conversation:
        """A conversation without a turn, under an id that nobody guesses."""
        chat = Conversation(secrets.token_urlsafe(6), self.services)
        with self._lock:
            self._conversations[chat.chat_id] = chat
            idle = [key for key, other in self._conversations.items() if other.under_way is None]
            for chat_id in idle[: max(0, len(self._conversations) - MAX_KEPT)]:
                del self._conversations[chat_id]
        return chat

    def load(self, config: EngineConfig) -> None:
        """Fetch and load what `config` names, and return at once; it waits for runs and answers that are under way.

        Raises `EngineError` while another one is being loaded.
        """
        with self._lock:
            if self.is_loading:
                raise EngineError("a model is being loaded: cancel that, or wait for its end")
            self._cancel = cancel = threading.Event()
            self._loading = Loading(config.model.name, Phase("waiting for the engine"))
        threading.Thread(target=self._load, args=(config, cancel), name="servelab-load", daemon=True).start()

    def cancel_loading(self) -> None:
        self._cancel.set()

    def _load(self, config: EngineConfig, cancel: threading.Event) -> None:
        name = config.model.name

        def on_phase(phase: Phase) -> None:
            if cancel.is_set():
                raise _Cancelled
            self._loading = Loading(name, phase)

        try:
            queue = self.services.queue
            while not queue.try_borrow(alone=True):
                if cancel.wait(RETRY_S):
                    raise _Cancelled
            try:
                _fetch_and_load(self.services, config, on_phase)
            finally:
                queue.give_back()
            self._loading = None
        except _Cancelled:
            self._loading = None
        except ServeLabError as error:
            self._loading = Loading(name, Phase("failed"), str(error))
        except Exception as error:
            logger.exception("%s could not be loaded", name)
            self._loading = Loading(name, Phase("failed"), f"{type(error).__name__}: {error}")


def playground_of(services: Services) -> Playground:
    """The one of these services."""
    global _playground
    with _lock:
        if _playground is None or _playground.services is not services:
            _playground = Playground(services)
        return _playground


def _fetch_and_load(services: Services, config: EngineConfig, on_phase: Callable[[Phase], None]) -> None:
    from backend.models.sources import ensure_model

    def on_progress(what: str, done: float, total: float, unit: str) -> None:
        on_phase(Phase("pulling", done, total, unit) if total else Phase("pulling"))

    check_engine(config)
    on_phase(Phase("pulling"))
    ensure_model(config.model.name, on_progress)
    on_phase(Phase("loading"))
    services.host.load(config, on_phase)
