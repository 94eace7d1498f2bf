"""`SpeculativeOutputProcessor`: an `OutputProcessor` that says where tokens come from, and counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backend.core.output import RequestOutput, TokenOrigin
from backend.engine.output_processor import OutputProcessor
from backend.request import Request
from backend.workload.targets import SpeculationCounts, StreamEvent


class SpeculativeOutputProcessor(OutputProcessor):
    """What is counted is what was delivered: a draft's tokens behind a stop were accepted in vain."""

    def process_step(self, outputs: Iterable[RequestOutput], time: float) -> tuple[list[StreamEvent], list[str]]:
        events, stopped = [], []
        states = self._states
        for output in outputs:
            state = states[output.request_id]
            if output.finish_reason is None and state.stop_filter is None:  # nearly always
                token_ids, origins = output.new_token_ids, output.origins
                if output.num_draft_tokens and origins is not None:
                    _count(state.request, output.num_draft_tokens, origins)
                text = state.stream.push(token_ids)
                events.append(StreamEvent(output.request_id, time, tuple(token_ids), text, origins=origins))
                continue
            event, ended_by_text = self.process(output, time)
            events.append(event)
            if ended_by_text:
                stopped.append(output.request_id)
        return events, stopped

    def process(self, output: RequestOutput, time: float) -> tuple[StreamEvent, bool]:
        request = self._states[output.request_id].request
        event, ended_by_text = super().process(output, time)
        if output.origins is not None:
            event.origins = delivered = output.origins[: len(event.token_ids)]
            if output.num_draft_tokens:
                _count(request, output.num_draft_tokens, delivered)
        if event.finish_reason is not None:
            event.speculation = SpeculationCounts(
                request.num_rounds, request.num_draft_tokens, request.num_accepted_tokens
            )
        return event, ended_by_text


def _count(request: Request, num_draft_tokens: int, origins: Sequence[TokenOrigin]) -> None:
    request.num_rounds += 1
    request.num_draft_tokens += num_draft_tokens
    request.num_accepted_tokens += origins.count("accepted")
