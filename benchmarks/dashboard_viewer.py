"""`Viewer`: a browser with the Run page open, as far as the server can tell.

It does what Streamlit's frontend does on `/_stcore/stream`: asks for the page, keeps the state of its widgets and sends it
with every rerun, starts a timer for each fragment that asks to be rerun, and stops all of them when the page is run anew.
"""

from __future__ import annotations

import copy
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.Element_pb2 import Element
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.NumberInput_pb2 import NumberInput
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from app import formatting
from backend.errors import EngineError

TIMEOUT_S = 60.0

_PAGE = "run"
_LIVE_FIGURE = "Output"  # a metric that the page has while a run goes on, and its live fragment alone
_SUBPROTOCOLS = (Subprotocol("streamlit"), Subprotocol("PLACEHOLDER_AUTH_TOKEN"))
_VALUE_FIELDS = {
    "checkbox": "bool_value",
    "number_input": "double_value",
    "selectbox": "string_value",
    "text_area": "string_value",
    "text_input": "string_value",
}


@dataclass
class Seen:
    """What a viewer did and got."""

    draw_s: list[float] = field(default_factory=list)  # of whole pages: from asking to the last message
    reruns: int = 0  # of fragments
    look_s: list[float] = field(default_factory=list)  # of those with live figures: from asking to the last message
    received_bytes: int = 0


@dataclass
class _Timer:
    interval_s: float
    due: float  # perf_counter
    asked: float = 0.0


class Viewer:
    """Opens the page at once and follows it on a thread of its own until it is closed. Raises `EngineError`."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: of the server, without a path.
        """
        self._url = url
        self._seen = Seen()
        self._page_hash = ""
        self._widgets: dict[str, WidgetState] = {}
        self._timers: dict[str, _Timer] = {}  # by fragment id
        self._fragments: list[str] = []  # rerun now; empty while the page as a whole is run
        self._is_look = False
        self._asked = 0.0  # when the whole page was asked for, by perf_counter
        self._failure: str | None = None
        self._drawn = threading.Event()
        self._lock = threading.Lock()  # on all of the above
        address = f"{url.replace('http', 'ws', 1)}/_stcore/stream"
        self._connection = ExitStack()
        try:
            self._socket = self._connection.enter_context(
                connect(address, origin=Origin(url), subprotocols=_SUBPROTOCOLS, max_size=None, open_timeout=TIMEOUT_S)
            )
        except (OSError, WebSocketException) as error:
            raise EngineError(f"the dashboard takes no viewer: {error}") from None
        self._thread = threading.Thread(target=self._watch, name="viewer", daemon=True)
        self._thread.start()
        self.draw()

    def draw(self) -> None:
        """Ask for the whole page."""
        with self._lock:
            self._drawn.clear()
            self._asked = time.perf_counter()
            try:
                self._rerun()
            except WebSocketException as error:
                self._fail(_gone(error))

    def wait_until_drawn(self) -> None:
        if not self._drawn.wait(TIMEOUT_S):
            raise EngineError(f"the page was not drawn within {TIMEOUT_S:.0f} s")
        self.seen()

    def seen(self) -> Seen:
        """All so far."""
        with self._lock:
            if self._failure is not None:
                raise EngineError(self._failure)
            return copy.deepcopy(self._seen)

    def close(self) -> None:
        self._connection.close()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while True:
                try:
                    message = self._socket.recv(timeout=self._pause())
                except TimeoutError:
                    message = None
                with self._lock:
                    if isinstance(message, bytes):
                        self._take(message)
                    self._rerun_due_fragments()
        except WebSocketException as error:
            with self._lock:
                self._fail(_gone(error))

    def _pause(self) -> float | None:
        """Seconds until a fragment is due; None when none has a timer."""
        with self._lock:
            due = min((timer.due for timer in self._timers.values()), default=None)
        return None if due is None else max(0.0, due - time.perf_counter())

    # Everything below holds the lock.

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._drawn.set()  # nobody may be left waiting

    def _take(self, data: bytes) -> None:
        self._seen.received_bytes += len(data)
        message = ForwardMsg.FromString(data)
        match message.WhichOneof("type"):
            case "new_session":
                self._begin(message)
            case "auto_rerun":
                self._set_timer(message.auto_rerun.fragment_id, message.auto_rerun.interval)
            case "stop_auto_rerun":
                for fragment_id in message.stop_auto_rerun.fragment_ids:
                    self._timers.pop(fragment_id, None)
            case "delta" if message.delta.WhichOneof("type") == "new_element":
                self._show(message.delta.new_element)
            case "script_finished":
                self._finish(message.script_finished)

    def _begin(self, message: ForwardMsg) -> None:
        self._page_hash = message.new_session.page_script_hash
        self._fragments, self._is_look = list(message.metadata.run.fragment_ids), False
        if not self._fragments:
            self._timers.clear()
            self._widgets.clear()

    def _set_timer(self, fragment_id: str, interval_s: float) -> None:
        timer = self._timers.get(fragment_id)
        if timer is None or timer.interval_s != interval_s:
            self._timers[fragment_id] = _Timer(interval_s, time.perf_counter() + interval_s)

    def _show(self, element: Element) -> None:
        kind = element.WhichOneof("type")
        if kind == "exception":
            self._fail(f"the page shows an exception: {element.exception.message}")
        elif kind == "metric":
            self._is_look |= element.metric.label == _LIVE_FIGURE and element.metric.body != formatting.NONE
        elif kind in _VALUE_FIELDS:
            widget = getattr(element, kind)
            self._widgets[widget.id] = _state_of(kind, widget)

    def _finish(self, status: ForwardMsg.ScriptFinishedStatus.ValueType) -> None:
        if status == ForwardMsg.FINISHED_SUCCESSFULLY:
            self._seen.draw_s.append(time.perf_counter() - self._asked)
            self._drawn.set()
        elif status == ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY:
            self._seen.reruns += len(self._fragments)  # those that were due together are rerun together
            asked = [timer.asked for name, timer in self._timers.items() if name in self._fragments]
            if self._is_look and asked:
                self._seen.look_s.append(time.perf_counter() - min(asked))

    def _rerun_due_fragments(self) -> None:
        now = time.perf_counter()
        for fragment_id, timer in self._timers.items():
            if timer.due <= now:
                timer.asked, timer.due = now, max(now, timer.due + timer.interval_s)
                self._rerun(fragment_id)

    def _rerun(self, fragment_id: str = "") -> None:
        """Ask for one fragment as its timer does, or for the whole page."""
        request = BackMsg()
        state = request.rerun_script
        state.page_script_hash, state.page_name = self._page_hash, "" if self._page_hash else _PAGE
        state.fragment_id, state.is_auto_rerun = fragment_id, bool(fragment_id)
        state.widget_states.widgets.extend(self._widgets.values())
        context = state.context_info
        context.timezone, context.locale, context.color_scheme = "UTC", "en-US", "light"
        context.url = f"{self._url}/{_PAGE}"
        self._socket.send(request.SerializeToString())


def _gone(error: WebSocketException) -> str:
    return f"the dashboard has left its viewer: {error}"


def _state_of(kind: str, widget: Any) -> WidgetState:
    """A widget's state as it is drawn: with what the page put in, else its default, else nothing."""
    state = WidgetState(id=widget.id)
    source = ("raw_value" if kind == "selectbox" else "value") if widget.set_value else "default"
    is_optional = widget.DESCRIPTOR.fields_by_name[source].has_presence
    if is_optional and not widget.HasField(source):
        return state
    value = getattr(widget, source)
    if kind == "selectbox" and source == "default":
        value = widget.options[value]
    if kind == "number_input" and widget.data_type == NumberInput.INT:
        state.int_value = int(value)
    else:
        setattr(state, _VALUE_FIELDS[kind], value)
    return state
