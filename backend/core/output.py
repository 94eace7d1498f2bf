"""What crosses between scheduler, worker and engine: ints and lists, no tensors, no device. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from backend.request import FinishReason
from backend.sampling_params import SamplingParams

StepKind = Literal["prefill", "decode", "recompute"]


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request the worker has not seen, or has forgotten since its preemption."""

    request_id: str
    token_ids: list[int]  # prompt, and after a preemption the output so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    banned_token_ids: tuple[int, ...]  # may not be sampled before `sampling_params.min_tokens`: EOS and stop ids
    block_ids: list[list[int]]  # one list per KV group
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """What changed for a request the worker knows."""

    request_id: str
    new_block_ids: list[list[int]]  # one list per KV group
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. The order of `num_scheduled_tokens` is the order of the batch: single-token rows first."""

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]  # request_id -> tokens to run in this step
    kinds: dict[str, StepKind]  # request_id -> what those tokens are
    finished_request_ids: list[str]  # since the last step: the worker forgets them
    preempted_request_ids: list[str]  # in this step: likewise

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Sampled ids per request that had its last known token computed in this step, in batch order."""

    sampled_token_ids: dict[str, list[int]]
    errors: dict[str, str] = field(default_factory=dict)  # request_id -> why it has no usable logits


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step yielded for one request, still as ids."""

    request_id: str
    new_token_ids: list[int]  # without a final EOS or stop token
    finish_reason: FinishReason | None
    error: str | None = None
