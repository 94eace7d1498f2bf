"""`EngineConfig`: everything that decides how the engine runs, and nothing that decides what is asked of it.

A field left at None is filled in when the model is loaded (`resolve`), from the device and the model; a run stores both the
config as asked and as resolved. Only values that exist are allowed: others are refused by name.
"""

from __future__ import annotations

import os
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from backend.errors import ConfigError
from backend.settings import Section, Settings
from backend.speculative_settings import SpeculativeSettings

DEFAULT_MODEL = "smollm2-135m"


class ModelSettings(Section):
    name: str = Field(
        DEFAULT_MODEL, min_length=1, description="A pulled model, a Hugging Face folder, or dummy:<shape>."
    )
    revision: str | None = Field(None, description="Revision of a hub model; local models have none.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations. auto: bfloat16 on CUDA, float32 on CPU."
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto takes the GPU when there is one.")
    max_model_len: int | None = Field(
        None, ge=2, lt=2**31, description="Longest prompt plus output, in tokens; cut to what the KV cache holds."
    )


class CacheSettings(Section):
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256] = Field(
        16, description="Tokens per KV block: small wastes less, large needs fewer table entries."
    )
    num_blocks: int | None = Field(
        None, ge=1, lt=2**31, description="KV blocks to allocate; by default what the memory settings leave."
    )
    dtype: Literal["auto", "fp8_e4m3", "int8", "int4"] = Field(
        "auto",
        description="KV element type; auto is the model's. fp8_e4m3 and int8 hold twice the tokens of 16 bits, int4 three "
        "and a half times, at some loss: each key and value has an fp16 scale of its own.",
    )
    layout: Literal["paged", "contiguous", "none"] = Field(
        "paged",
        description="paged: blocks as they are needed. contiguous: room for the longest request, reserved at once. "
        "none: no KV cache, every step runs all tokens again.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep the KV of full blocks, so that requests that begin alike share it."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of GPU memory for weights, activations and KV cache together."
    )
    cpu_bytes: int = Field(2**30, ge=2**20, le=2**50, description="KV cache size on the CPU, in bytes.")
    swap_bytes: int = Field(
        2**30,
        ge=1,
        le=2**50,
        description="Host memory for swapped requests with scheduler.preemption = 'swap', in bytes.",
    )


class SchedulerSettings(Section):
    max_num_seqs: int | None = Field(None, ge=1, le=4096, description="Most requests in one step. CUDA 256, CPU 16.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Token budget of one step: small keeps decoding smooth, large prefills faster.",
    )
    batching: Literal["continuous", "static"] = Field(
        "continuous",
        description="continuous: a free slot is filled at once. static: a batch runs until its longest request has ended.",
    )
    policy: Literal["fcfs", "prefill_first", "priority"] = Field(
        "fcfs",
        description="fcfs: decodes first, prompts with what is left. prefill_first: prompts whole, decodes stall meanwhile. "
        "priority: as fcfs, the lowest priority number before the others.",
    )
    preemption: Literal["recompute", "swap"] = Field(
        "recompute",
        description="Of a request that has to give up its blocks. recompute: they are computed again later. swap: they are "
        "copied to host memory, as much as cache.swap_bytes holds, and back.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Schedule a step while the one before runs, so that the GPU never waits; with speculation, which needs its "
        "result, while its tokens are delivered. CUDA yes, CPU no.",
    )


# Of the quantization settings, those that some methods have.
_METHODS_OF_OPTIONS = {
    "bits": ("int4",),
    "group_size": ("int4", "nf4"),
    "zero_point": ("int4",),
    "granularity": ("fp8",),
    "threshold": ("llm_int8",),
}


class QuantizationSettings(Section):
    """Of a checkpoint in 16 or 32 bits, as it is loaded; a quantized checkpoint says itself how it is stored."""

    method: Literal["int8", "int4", "nf4", "fp8", "w8a8_int8", "llm_int8"] | None = Field(
        None,
        description="Layers' weights in fewer bits. int8: a scale per output channel. int4: of 2 to 8 bits, a scale per group, "
        "rounded to nearest. nf4: 4 bits, levels as weights are distributed. fp8, w8a8_int8: activations too, in E4M3 or "
        "int8. llm_int8: the same, inputs with outliers excepted.",
    )
    bits: int | None = Field(None, ge=2, le=8, description="Of a weight, for int4; 4 by default.")
    group_size: int | None = Field(
        None,
        ge=-1,
        le=2**20,
        description="Inputs that share a scale, for int4 and nf4: a multiple of 32 that divides every layer's inputs, or -1 "
        "for all of an output channel. By default 128 (nf4: 64), or less where that does not divide them.",
    )
    zero_point: Literal["none", "integer", "float"] | None = Field(
        None,
        description="For int4. none: codes lie around 0. integer: around a code of their group. float: above a minimum of "
        "their group, the default.",
    )
    granularity: Literal["channel", "tensor"] | None = Field(
        None,
        description="For fp8. channel: a scale per output channel and per token, the default. tensor: one of a layer's weights "
        "and one of its activations.",
    )
    threshold: float | None = Field(
        None, gt=0, description="For llm_int8: inputs with a value of at least this are outliers; 6 by default."
    )
    head: Literal["int8"] | None = Field(
        None,
        description="int8: the output head multiplies by weights of 8 bits too. By default it stays as it is; the embedding "
        "always does.",
    )
    skip: tuple[str, ...] = Field(
        (), strict=False, description="Patterns of layers to leave as they are, as in model.layers.0.* or *.down_proj."
    )

    @field_validator("method", mode="before")
    @classmethod
    def _is_not_calibrated(cls, value: Any) -> Any:
        """Some methods of checkpoints are none of loading."""
        if value in ("gptq", "awq"):
            raise ValueError(
                f"{value!r} needs calibration, for which loading a model has no text: "
                f"`servelab quantize MODEL --method {value} --name NAME` makes such a model, called NAME"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _forget_what_is_no_more(cls, data: Any) -> Any:
        """Runs stored before there was a method carry a null `symmetric` and a null `skip`."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if not (key in ("symmetric", "skip") and value is None)}

    @model_validator(mode="after")
    def _options_have_their_method(self) -> Self:
        for name, methods in _METHODS_OF_OPTIONS.items():
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                raise ValueError(f"{name} = {value!r} belongs to method = {' or '.join(map(repr, methods))}")
        if self.head is not None and self.method is None:
            raise ValueError(f"head = {self.head!r} needs a method for the layers")
        return self


class KernelSettings(Section):
    backend: Literal["auto", "triton", "reference"] = Field(
        "auto", description="Implementation of the ops. auto: triton on CUDA, reference (plain torch) on the CPU."
    )
    enforce_eager: bool = Field(False, description="Launch every op by itself, without CUDA graphs.")
    batch_invariant: bool = Field(
        False, description="Sum in an order that does not depend on the batch: equal tokens bit for bit, at some speed."
    )
    cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads for CPU math; by default one core is left to the dashboard."
    )


class TargetSettings(Section):
    kind: Literal["in_process"] = "in_process"
    url: None = None


class ParallelSettings(Section):
    tensor: Literal[1] = 1


class EngineConfig(Settings):
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    quantization: QuantizationSettings = QuantizationSettings()
    speculative: SpeculativeSettings = SpeculativeSettings()
    kernels: KernelSettings = KernelSettings()
    target: TargetSettings = TargetSettings()
    parallel: ParallelSettings = ParallelSettings()

    def resolve(self, *, device: Literal["cuda", "cpu"], max_model_len: int) -> EngineConfig:
        """Fill what depends on the device and the model; `cache.num_blocks` follows once memory is known.

        Args:
            device: where the model runs.
            max_model_len: the model's own context, in tokens.
        Raises:
            ConfigError: Triton's kernels are to run on the CPU, and its interpreter is not switched on.
        """
        on_cuda = device == "cuda"
        if self.kernels.backend == "triton" and not on_cuda and not _interprets_triton():
            raise ConfigError("kernels.backend = 'triton' needs a CUDA device; allowed on a CPU: 'auto', 'reference'")
        dtype = self.model.dtype if self.model.dtype != "auto" else ("bfloat16" if on_cuda else "float32")
        length = min(self.model.max_model_len or max_model_len, max_model_len)
        backend = self.kernels.backend if self.kernels.backend != "auto" else ("triton" if on_cuda else "reference")
        asynchronous = self.scheduler.async_scheduling
        return self.with_overrides(
            {
                "model.device": device,
                "model.dtype": dtype,
                "model.max_model_len": length,
                "scheduler.max_num_seqs": self.scheduler.max_num_seqs or (256 if on_cuda else 16),
                "scheduler.max_num_batched_tokens": self.scheduler.max_num_batched_tokens or (8192 if on_cuda else 512),
                "kernels.cpu_threads": self.kernels.cpu_threads or default_cpu_threads(),
                "scheduler.async_scheduling": on_cuda if asynchronous is None else asynchronous,
                "kernels.backend": backend,
                "kernels.enforce_eager": self.kernels.enforce_eager or backend == "reference",
            }
        )


def _interprets_triton() -> bool:
    """Whether Triton, which reads this variable itself, runs kernels without a GPU: slowly, to test them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def default_cpu_threads() -> int:
    """One core is left to the dashboard: page and engine share the machine."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
