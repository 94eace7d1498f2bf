"""`Workload`: what is asked of a target and when. Same seed, same prompts, lengths and arrivals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from backend.sampling_params import SamplingSettings
from backend.settings import Settings

MAX_LENGTH = 2**24  # tokens; beyond any model's context
MAX_REQUESTS = 100_000
MAX_TURNS = 1000  # of one conversation
Rate = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]  # with less, times overflow


class FixedLength(Settings):
    kind: Literal["fixed"] = "fixed"
    value: int = Field(ge=1, le=MAX_LENGTH)


class UniformLength(Settings):
    kind: Literal["uniform"] = "uniform"
    min: int = Field(ge=1, le=MAX_LENGTH)
    max: int = Field(ge=1, le=MAX_LENGTH)

    @model_validator(mode="after")
    def _ordered(self) -> UniformLength:
        if self.min > self.max:
            raise ValueError(f"min = {self.min} is above max = {self.max}")
        return self


class NormalLength(Settings):
    """Rounded and cut to `min..max`."""

    kind: Literal["normal"] = "normal"
    mean: float = Field(gt=0, le=MAX_LENGTH, allow_inf_nan=False)
    std: float = Field(ge=0, le=MAX_LENGTH, allow_inf_nan=False)
    min: int = Field(1, ge=1, le=MAX_LENGTH)
    max: int = Field(2**20, ge=1, le=MAX_LENGTH)

    @model_validator(mode="after")
    def _ordered(self) -> NormalLength:
        if self.min > self.max:
            raise ValueError(f"min = {self.min} is above max = {self.max}")
        return self


LengthDistribution = Annotated[FixedLength | UniformLength | NormalLength, Field(discriminator="kind")]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)] | LengthDistribution


class PromptsSource(Settings):
    """Text prompts: the built-in 16, a list, or a JSONL file with one prompt per line in `field`."""

    kind: Literal["prompts"] = "prompts"
    prompts: tuple[str, ...] | None = Field(
        None, strict=False, description="Prompts given in place of the built-in set."
    )
    file: str | None = Field(None, description="Path of a JSONL file.")
    field: str = Field(
        "prompt", min_length=1, description="Key of the prompt in each line; a list's first item is used."
    )
    limit: int | None = Field(None, ge=1, description="Use the first so many.")
    chat: bool = Field(True, description="Apply the model's chat template.")

    @model_validator(mode="after")
    def _one_origin(self) -> PromptsSource:
        if self.prompts is not None and self.file is not None:
            raise ValueError("prompts and file are both set; give one of them")
        if self.prompts is not None and not self.prompts:
            raise ValueError("prompts is empty; give at least one, or leave it out for the built-in set")
        return self


class SyntheticSource(Settings):
    """Random token ids: exact lengths, no text."""

    kind: Literal["synthetic"] = "synthetic"
    num_requests: int = Field(16, ge=1, le=MAX_REQUESTS)
    prompt_len: Length = 128


class SharedPrefixSource(Settings):
    """Groups of prompts of random ids; a group's prompts begin with the same `prefix_len` ids."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    groups: int = Field(4, ge=1, le=MAX_REQUESTS)
    prompts_per_group: int = Field(4, ge=1, le=MAX_REQUESTS)
    prefix_len: int = Field(256, ge=1, le=MAX_LENGTH)
    suffix_len: Length = 32

    @model_validator(mode="after")
    def _not_too_many(self) -> SharedPrefixSource:
        if self.groups * self.prompts_per_group > MAX_REQUESTS:
            raise ValueError(
                f"groups x prompts_per_group = {self.groups * self.prompts_per_group:,}; at most {MAX_REQUESTS:,} are allowed"
            )
        return self


class TraceSource(Settings):
    """The requests of a CSV trace (Azure LLM inference traces): columns `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.

    Prompts are random ids of the row's length. An answer has the row's length too, whatever the model would say: no end of
    sequence stops it, and `output_len` is not used.
    """

    kind: Literal["trace"] = "trace"
    file: str = Field(min_length=1, description="Path of a CSV file.")
    limit: int = Field(32, ge=1, le=MAX_REQUESTS, description="Replay the first so many.")
    max_prompt_len: int | None = Field(None, ge=1, le=MAX_LENGTH, description="Cut longer prompts to so many tokens.")
    max_output_len: int | None = Field(None, ge=1, le=MAX_LENGTH, description="Cut longer answers to so many tokens.")


class MooncakeSource(Settings):
    """The requests of a JSONL trace with prefixes in common (Mooncake, Qin et al., 2025).

    A line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each block of `block_len` prompt
    tokens. Equal hash ids give equal blocks of random ids, so prompts share what they shared in the trace. Answers have
    exactly the length of the line, as with `TraceSource`.
    """

    kind: Literal["mooncake"] = "mooncake"
    file: str = Field(min_length=1, description="Path of a JSONL file.")
    limit: int = Field(32, ge=1, le=MAX_REQUESTS, description="Replay the first so many.")
    block_len: int = Field(512, ge=1, le=MAX_LENGTH, description="Prompt tokens per hash id.")
    scale: int = Field(1, ge=1, le=MAX_LENGTH, description="Divide all lengths by this, the blocks' too.")
    max_prompt_len: int | None = Field(None, ge=1, le=MAX_LENGTH, description="Cut longer prompts to so many tokens.")
    max_output_len: int | None = Field(None, ge=1, le=MAX_LENGTH, description="Cut longer answers to so many tokens.")

    @model_validator(mode="after")
    def _whole_blocks(self) -> MooncakeSource:
        if self.block_len % self.scale:
            raise ValueError(f"scale = {self.scale} does not divide block_len = {self.block_len}")
        return self


class ConversationsSource(Settings):
    """Conversations of random ids: a turn's prompt is all before it, the model's answers included, and its own new ids.

    A conversation's next turn arrives when the answer before it has ended and a pause for thought has passed; the first
    turns arrive as `arrivals` says. A closed loop counts conversations: one that thinks keeps its place.
    """

    kind: Literal["conversations"] = "conversations"
    num_conversations: int = Field(4, ge=1, le=MAX_REQUESTS)
    turns: Length = 4
    first_len: Length = 64
    turn_len: Length = 32
    system_len: int = Field(0, ge=0, le=MAX_LENGTH, description="Tokens that all conversations begin with.")
    think_time_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Mean pause before a further turn, exponential; 0 for none.",
    )


class AllAtOnce(Settings):
    kind: Literal["all_at_once"] = "all_at_once"


class ClosedLoop(Settings):
    """A new request starts when one ends: `concurrency` are always in flight. The samples of a prompt are one of them."""

    kind: Literal["closed_loop"] = "closed_loop"
    concurrency: int = Field(4, ge=1, le=100_000)


class ConstantRate(Settings):
    kind: Literal["constant"] = "constant"
    rate: Rate = Field(description="Requests per second.")


class PoissonRate(Settings):
    kind: Literal["poisson"] = "poisson"
    rate: Rate = Field(description="Mean requests per second.")


class GammaRate(Settings):
    """Independent gaps of a gamma distribution, as in vLLM's serving benchmark; they vary by 1 / sqrt(burstiness)."""

    kind: Literal["gamma"] = "gamma"
    rate: Rate = Field(description="Mean requests per second.")
    burstiness: float = Field(
        1.0, ge=1e-3, le=1e6, allow_inf_nan=False, description="Shape of the gaps: 1 is Poisson, below in bursts."
    )


class TraceTimes(Settings):
    """The times of the trace that the source replays, from its first request on."""

    kind: Literal["trace"] = "trace"
    speedup: Rate = Field(1.0, description="Replay the times so much faster.")


class ServiceLevel(Settings):
    """Limits a request must meet to count for goodput; None is no limit. `preset` fills what is left out."""

    preset: Literal["chat"] | None = Field(None, description="chat: TTFT 200 ms, TPOT 50 ms.")
    ttft_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_ms: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def limits(self) -> dict[str, float]:
        """Metric name -> limit in ms, of the limits that are set."""
        preset = {"ttft_ms": 200.0, "tpot_ms": 50.0} if self.preset == "chat" else {}
        own = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}
        return preset | {name: value for name, value in own.items() if value is not None}


Source = Annotated[
    PromptsSource | SyntheticSource | SharedPrefixSource | TraceSource | MooncakeSource | ConversationsSource,
    Field(discriminator="kind"),
]
Arrivals = Annotated[
    AllAtOnce | ClosedLoop | ConstantRate | PoissonRate | GammaRate | TraceTimes, Field(discriminator="kind")
]

Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Weight = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class Workload(Settings):
    """The default is what `servelab run` without files and the Run page's untouched form both run.

    A trace arrives at its own times unless `arrivals` is given.
    """

    source: Source = PromptsSource()
    arrivals: Arrivals = AllAtOnce()
    output_len: Length = Field(64, description="Most tokens generated per request.")
    sampling: SamplingSettings = SamplingSettings()
    slo: ServiceLevel = ServiceLevel()
    warmup_requests: int = Field(1, ge=0, le=1000, description="Run first and left out of every figure.")
    reset_prefix_cache: bool = Field(
        True, description="Start without the KV of earlier runs, so that figures do not depend on them."
    )
    priorities: dict[Priority, Weight] = Field(
        {},
        description="How often each priority number is drawn, as in {0 = 0.2, 1 = 0.8}: lower is served first with "
        "scheduler.policy = 'priority'. A conversation keeps its number. Without any, all have 0.",
    )
    seed: int = Field(0, ge=0, lt=2**63)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """As with all settings; arrivals that come with the source follow a change of it."""
        source = overrides.get("source")
        kind = overrides.get("source.kind", source.get("kind") if isinstance(source, Mapping) else self.source.kind)
        chosen = "arrivals" in overrides or self.arrivals.kind != _natural_arrivals(self.source.kind)
        return super().with_overrides(overrides if chosen else {"arrivals.kind": _natural_arrivals(kind), **overrides})

    @model_validator(mode="before")
    @classmethod
    def _fill_in_arrivals(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "arrivals" in data:
            return data
        source = data.get("source")
        kind = source.get("kind") if isinstance(source, Mapping) else getattr(source, "kind", None)
        return {**data, "arrivals": {"kind": _natural_arrivals(kind)}}

    @field_validator("priorities", mode="before")
    @classmethod
    def _numbers_as_keys(cls, value: Any) -> Any:
        """Keys of JSON and TOML are text."""
        if not isinstance(value, Mapping):
            return value
        return {
            int(key) if re.fullmatch(r"0|-?[1-9]\d{0,9}", str(key)) else key: weight for key, weight in value.items()
        }

    @model_validator(mode="after")
    def _one_answer_to_go_on_from(self) -> Workload:
        if isinstance(self.source, ConversationsSource) and self.sampling.n > 1:
            raise ValueError(
                f"sampling.n = {self.sampling.n} with source.kind = 'conversations': a conversation goes on from one "
                "answer; allowed: 1"
            )
        return self

    @model_validator(mode="after")
    def _times_to_arrive_at(self) -> Workload:
        if isinstance(self.arrivals, TraceTimes) and not isinstance(self.source, TraceSource | MooncakeSource):
            raise ValueError(
                f"arrivals.kind = 'trace' needs the times of a trace, and source.kind = {self.source.kind!r} has none; "
                "allowed with it: 'all_at_once', 'closed_loop', 'constant', 'poisson', 'gamma'"
            )
        return self


def _natural_arrivals(source_kind: Any) -> str:
    """The arrivals of a source for which none are chosen."""
    return "trace" if source_kind in ("trace", "mooncake") else "all_at_once"
