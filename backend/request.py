"""`Request`: one generation job, from arrival to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from backend.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
RequestStatus = Literal["waiting", "running", "preempted", "swapped", "finished"]

NEVER = 2**62  # tokens that no request has


@dataclass(slots=True, eq=False)
class Request:
    """Engine-side state of a request. Times are `time.perf_counter()` seconds.

    What the step loop needs at every token is a plain field, worked out once.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    arrival_time: float
    priority: int = 0  # lower runs first, under `scheduler.policy = "priority"`
    parent_id: str | None = None  # whose sample it is; None for the only one of its prompt
    sample_index: int = 0  # which one
    status: RequestStatus = "waiting"
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(init=False)  # prompt and output
    num_prompt_tokens: int = field(init=False)
    min_num_tokens: int = field(init=False)  # prompt and output; fewer are not ended by an id
    max_num_tokens: int = field(init=False)  # prompt and output; the scheduler cuts it to the engine's `max_model_len`
    ending_token_ids: frozenset[int] = field(init=False)  # end this request once `min_tokens` are out
    num_placeholder_tokens: int = 0  # scheduled to be sampled, ids not known here yet
    num_computed_tokens: int = 0  # KV present, or on its way in a step that has been scheduled
    num_slots: int = 0  # tokens that its KV blocks have room for; kept by the `KVCacheManager`
    # Of the KV, what its first admission found in the prefix cache; None before that, and without one.
    num_cached_tokens: int | None = None
    next_cache_at: int = NEVER  # computed tokens at which a further block can be found; kept by the `KVCacheManager`
    block_hashes: list[list[bytes]] = field(default_factory=list)  # of full blocks, a list per KV group; likewise
    num_preemptions: int = 0
    num_recompute_tokens: int = 0  # tokens that had been computed before the last preemption
    last_scheduled_step: int = -1
    scheduled_time: float | None = None
    # Of speculation, counted by what was delivered: steps in which some of its tokens were drafted, drafted tokens, and those
    # of them that are part of the output.
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_rate: float | None = None  # how often its drafted tokens are accepted, see `AdaptiveLength`
    draft_share: float | None = None  # how often there was anything to draft; likewise
    num_draft_rounds: int = 0  # that say something of this
    draft_length: int | None = None  # how many of them it was last worth drafting; likewise
    # The unfinished samples of its prompt, itself included, where they share blocks; one list for all. Else None.
    samples: list[Request] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        params = self.sampling_params
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.max_num_tokens = self.num_prompt_tokens + params.max_tokens
        stops = frozenset(params.stop_token_ids)
        self.ending_token_ids = stops if params.ignore_eos else stops | self.eos_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, sampled: list[int]) -> tuple[list[int], FinishReason | None]:
        """Take sampled tokens up to the first that ends the request.

        Returns those of them that belong to its output, and why it ends.
        """
        token_ids = self.token_ids
        if len(sampled) == 1 and sampled[0] not in self.ending_token_ids:  # nearly always
            token_ids.append(sampled[0])
            return sampled, "length" if len(token_ids) >= self.max_num_tokens else None
        for index, token_id in enumerate(sampled):
            if token_id in self.ending_token_ids and len(token_ids) >= self.min_num_tokens:
                return sampled[:index], "stop"
            token_ids.append(token_id)
            if len(token_ids) >= self.max_num_tokens:
                return sampled[: index + 1], "length"
        return sampled, None

    @property
    def awaits_last_token(self) -> bool:
        """Of a request that decodes: the last token that it may have is on its way."""
        return self.num_computed_tokens + 1 >= self.max_num_tokens

    @property
    def num_forked_tokens(self) -> int:
        """Tokens whose KV it can have of another sample. The last one has to run for the next one to be sampled."""
        return min(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def awaits_sample(self) -> bool:
        """Of a waiting request: another sample is computing the prompt, and it can fork from that one then."""
        if self.samples is None or self.status == "swapped":
            return False
        computed = [other.num_computed_tokens for other in self.samples if other.status == "running"]
        return bool(computed) and max(computed) < self.num_forked_tokens


def sample_ids(request_id: str, n: int) -> list[str]:
    """The ids of the requests that a prompt's `n` samples are: its own for a single one, else `id/0`, `id/1` and so on."""
    return [request_id] if n == 1 else [f"{request_id}/{index}" for index in range(n)]
