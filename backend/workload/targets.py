"""`Target`: whatever serves requests. The workload driver, the metrics and History know only this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: text or ids, exactly one of them. `chat` applies the model's chat template to the text."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: bool = False


class SpeculationCounts(NamedTuple):
    """Of one request, counted by what was delivered."""

    num_rounds: int  # steps in which some of its tokens were drafted
    num_draft_tokens: int
    num_accepted_tokens: int  # of the drafted ones, those that were delivered


@dataclass(slots=True)
class StreamEvent:
    """A delivery to the client: the new tokens and text since the last one, and on the last one how it ended.

    Nobody changes one; there is one for every token, and building a frozen one takes six times as long.
    """

    request_id: str
    time: float
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    error: str | None = None
    # On the last event; None where the target cannot tell.
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int | None = None
    scheduled_time: float | None = None
    # With speculation, for each of `token_ids` where it comes from: "accepted", "recovered", "bonus" or "plain". Else None.
    origins: Sequence[str] | None = None
    speculation: SpeculationCounts | None = None  # on the last event, with speculation


class Target(Protocol):
    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Callable[[StreamEvent], None],
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Start a request. Thread-safe; `on_event` is called from the target's thread and must return at once.

        Raises `RequestError` when the request can never be served; nothing is delivered then. Otherwise exactly one event
        carries a `finish_reason`, and it is the last; with `sampling.n` above 1, one for each sample, whose events have the
        ids of `backend.request.sample_ids`. A target that knows priorities serves the lowest number first.
        """

    def abort(self, request_id: str) -> None:
        """Ask for an end, of all samples or of the one whose id it is; a finished or unknown id is ignored."""
