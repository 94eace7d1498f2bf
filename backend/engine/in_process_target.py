"""`InProcessTarget`: the engine of this process as a `Target`."""

from __future__ import annotations

from collections.abc import Callable

from backend.engine.engine_host import EngineHost
from backend.errors import RequestError
from backend.sampling_params import SamplingParams
from backend.workload.targets import Prompt, StreamEvent


class InProcessTarget:
    """Tokenizes on the caller's thread, so that the engine's thread only steps."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Callable[[StreamEvent], None],
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        self._host.submit(request_id, self.encode(prompt), sampling, on_event, arrival_time, priority)

    def abort(self, request_id: str) -> None:
        self._host.abort(request_id)

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids the engine will see. Raises `RequestError` for an empty prompt."""
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if not prompt.text:
            raise RequestError("the prompt is empty: it must hold at least one character")
        if prompt.chat:
            return self._host.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        return self._host.tokenizer.encode(prompt.text)
