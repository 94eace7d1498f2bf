"""`SpeculativeOutputProcessor`: an `OutputProcessor` that says where tokens come from, and counts them."""

from __future__ import annotations

from collections.abc import Iterable

from backend.core.output import RequestOutput
from backend.engine.output_processor import OutputProcessor
from backend.workload.targets import SpeculationCounts, StreamEvent


class SpeculativeOutputProcessor(OutputProcessor):
    """What is counted is what was delivered: a draft's tokens behind a stop were accepted in vain."""

    def process_step(self, outputs: Iterable[RequestOutput], time: float) -> tuple[list[StreamEvent], list[str]]:
        events, stopped = [], []
        for output in outputs:
            event, ended_by_text = self.process(output, time)
            events.append(event)
            if ended_by_text:
                stopped.append(output.request_id)
        return events, stopped

    def process(self, output: RequestOutput, time: float) -> tuple[StreamEvent, bool]:
        request = self._states[output.request_id].request
        event, ended_by_text = super().process(output, time)
        if output.origins is not None:
            event.origins = list(output.origins[: len(event.token_ids)])
            request.num_rounds += output.num_draft_tokens > 0
            request.num_draft_tokens += output.num_draft_tokens
            request.num_accepted_tokens += event.origins.count("accepted")
        if event.finish_reason is not None:
            event.speculation = SpeculationCounts(
                request.num_rounds, request.num_draft_tokens, request.num_accepted_tokens
            )
        return event, ended_by_text
