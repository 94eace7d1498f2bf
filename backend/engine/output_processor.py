"""`OutputProcessor`: a step's ids to what a client receives: text without split characters or stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backend.core.output import RequestOutput
from backend.detokenizer import StopStringFilter, TokenStream
from backend.request import Request
from backend.tokenizer import Tokenizer
from backend.workload.targets import StreamEvent


@dataclass(slots=True)
class _TextState:
    request: Request
    stream: TokenStream
    stop_filter: StopStringFilter | None  # None without stop strings


class OutputProcessor:
    """Keeps the text of every unfinished request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _TextState] = {}

    def add_request(self, request: Request) -> None:
        stop = request.sampling_params.stop
        stop_filter = StopStringFilter(stop) if stop else None
        self._states[request.request_id] = _TextState(request, self._tokenizer.new_stream(), stop_filter)

    def process_step(self, outputs: Iterable[RequestOutput], time: float) -> tuple[list[StreamEvent], list[str]]:
        """The events of a whole step, and the ids of the requests that a stop string has ended."""
        events, stopped = [], []
        states = self._states
        for output in outputs:
            state = states[output.request_id]
            if output.finish_reason is None and state.stop_filter is None:  # nearly always
                token_ids = output.new_token_ids
                events.append(StreamEvent(output.request_id, time, tuple(token_ids), state.stream.push(token_ids)))
                continue
            event, ended_by_text = self.process(output, time)
            events.append(event)
            if ended_by_text:
                stopped.append(output.request_id)
        return events, stopped

    def process(self, output: RequestOutput, time: float) -> tuple[StreamEvent, bool]:
        """The event for a client, and whether a stop string has ended a request that the scheduler still runs.

        An event with a `finish_reason` is a request's last, and the processor forgets it.
        """
        state = self._states[output.request_id]
        request = state.request
        token_ids, text, stopped = self._push(state, output.new_token_ids)
        finish_reason = output.finish_reason
        ended_by_text = stopped and finish_reason != "error"
        if ended_by_text:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._flush(state)
        if finish_reason is None:
            event = StreamEvent(output.request_id, time, token_ids, text)
            return event, False
        del self._states[output.request_id]
        event = StreamEvent(
            request_id=output.request_id,
            time=time,
            token_ids=token_ids,
            text=text,
            finish_reason=finish_reason,
            error=output.error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            scheduled_time=request.scheduled_time,
        )
        return event, ended_by_text and output.finish_reason is None

    def _push(self, state: _TextState, token_ids: list[int]) -> tuple[tuple[int, ...], str, bool]:
        """The tokens up to the one that completes a stop string, their text, and whether there is such a one."""
        if state.stop_filter is None:
            return tuple(token_ids), state.stream.push(token_ids), False
        text, num_before = "", state.request.num_output_tokens - len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            may_end = num_before + count >= state.request.sampling_params.min_tokens
            released, stopped = state.stop_filter.push(state.stream.push([token_id]), may_end=may_end)
            text += released
            if stopped:
                return tuple(token_ids[:count]), text, True
        return tuple(token_ids), text, False

    def _flush(self, state: _TextState) -> str:
        """What was held back: the text of an unfinished character, and what might have begun a stop string."""
        rest = state.stream.flush()
        if state.stop_filter is None:
            return rest
        released, stopped = state.stop_filter.push(rest)
        return released if stopped else released + state.stop_filter.flush()
