"""`Request`: one generation job, from arrival to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from backend.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
RequestStatus = Literal["waiting", "running", "preempted", "finished"]


@dataclass(slots=True, eq=False)
class Request:
    """Engine-side state of a request. Times are `time.perf_counter()` seconds."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    arrival_time: float
    status: RequestStatus = "waiting"
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(init=False)  # prompt and output
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recompute_tokens: int = 0  # tokens that had been computed before the last preemption
    last_scheduled_step: int = -1
    scheduled_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end this request once `min_tokens` are out."""
        stops = frozenset(self.sampling_params.stop_token_ids)
        return stops if self.sampling_params.ignore_eos else stops | self.eos_token_ids
