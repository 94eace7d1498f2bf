"""`Workload`: what is asked of a target and when. Same seed, same prompts, lengths and arrivals."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from backend.sampling_params import SamplingSettings
from backend.settings import Settings

MAX_LENGTH = 2**24  # tokens; beyond any model's context
MAX_REQUESTS = 100_000


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


class AllAtOnce(Settings):
    kind: Literal["all_at_once"] = "all_at_once"


class ClosedLoop(Settings):
    """A new request starts when one ends: `concurrency` are always in flight."""

    kind: Literal["closed_loop"] = "closed_loop"
    concurrency: int = Field(4, ge=1, le=100_000)


class ConstantRate(Settings):
    kind: Literal["constant"] = "constant"
    rate: float = Field(gt=0, le=1e6, allow_inf_nan=False, description="Requests per second.")


class PoissonRate(Settings):
    kind: Literal["poisson"] = "poisson"
    rate: float = Field(gt=0, le=1e6, allow_inf_nan=False, description="Mean requests per second.")


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


Source = Annotated[PromptsSource | SyntheticSource | SharedPrefixSource, Field(discriminator="kind")]
Arrivals = Annotated[AllAtOnce | ClosedLoop | ConstantRate | PoissonRate, Field(discriminator="kind")]


class Workload(Settings):
    """The default is what `servelab run` without files and the Run page's untouched form both run."""

    source: Source = PromptsSource()
    arrivals: Arrivals = AllAtOnce()
    output_len: Length = Field(64, description="Most tokens generated per request.")
    sampling: SamplingSettings = SamplingSettings()
    slo: ServiceLevel = ServiceLevel()
    warmup_requests: int = Field(1, ge=0, le=1000, description="Run first and left out of every figure.")
    reset_prefix_cache: bool = Field(
        True, description="Start without the KV of earlier runs, so that figures do not depend on them."
    )
    seed: int = Field(0, ge=0, lt=2**63)
