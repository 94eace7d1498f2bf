"""What a run of the kernel lab is asked to do. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from backend.settings import Settings

Experiment = Literal["check", "bench", "attention"]
DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")


class KernelLabConfig(Settings):
    """Which experiments, on what. What is left out is decided by the machine when the lab runs."""

    experiments: tuple[Experiment, ...] = Field(
        ("check", "bench"),
        strict=False,
        min_length=1,
        description="check: kernel against reference. bench: time of every shape. attention: fused or not over length.",
    )
    ops: tuple[str, ...] | None = Field(None, strict=False, description="Names of registered ops; all by default.")
    dtype: DType | None = Field(None, description="Of the values; by default bfloat16 on CUDA, float32 on the CPU.")
    implementation: Literal["both", "launch", "reference"] = Field(
        "both",
        description="What to time: the Triton kernel, its torch reference, or both. A CPU times references only.",
    )

    @model_validator(mode="after")
    def _some_op(self) -> KernelLabConfig:
        if self.ops is not None and not self.ops:
            raise ValueError("ops is empty; name at least one, or leave it out for all")
        return self
