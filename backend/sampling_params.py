"""How a request's next token is chosen and when it stops."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Annotated

from pydantic import Field, model_validator

from backend.settings import Settings

TokenId = Annotated[int, Field(ge=0)]

MAX_SAMPLES = 64  # of one prompt


class SamplingSettings(Settings):
    """The part of the sampling parameters that a workload fixes for all its requests."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES, description="Samples of each prompt, each with a seed of its own.")
    temperature: float = Field(
        0.0, ge=0, le=1e6, allow_inf_nan=False, description="0 is greedy; higher is more varied."
    )
    top_k: int = Field(-1, ge=-1, description="Keep the k likeliest tokens; -1 or 0 keeps all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the smallest set of tokens with this probability.")
    min_tokens: int = Field(0, ge=0, description="Neither EOS nor a stop before this many tokens.")
    ignore_eos: bool = Field(False, description="Go on past end-of-sequence until max_tokens.")
    stop: tuple[str, ...] = Field((), strict=False, description="Strings that end the text, themselves left out.")
    stop_token_ids: tuple[TokenId, ...] = Field((), strict=False, description="Token ids that end the output.")

    @model_validator(mode="after")
    def _no_empty_stop(self) -> SamplingSettings:
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every text at once; leave it out")
        return self


class SamplingParams(SamplingSettings):
    """All sampling parameters of one request.

    Every draw is a pure function of (`seed`, output position, purpose), so a request gives the same tokens alone, in any
    batch, chunked or preempted. With speculation a token's draw also depends on whether it was drafted, and with that a
    sampled request on how many drafts the step's budget left room for; its distribution does not.
    """

    seed: int = Field(0, ge=0, lt=2**63)
    max_tokens: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        return self

    def sample(self, index: int) -> SamplingParams:
        """The parameters of one of the `n` samples, as a request of its own would have them."""
        return self.model_copy(update={"n": 1, "seed": sample_seed(self.seed, index)})


def sample_seed(seed: int, index: int) -> int:
    """The seed of a prompt's sample: for the first the prompt's own, so that it is the answer to the plain request.

    For the others the upper 63 bits of blake2b-64 over both numbers, each as 8 bytes in little-endian order, read likewise.
    """
    if index == 0:
        return seed
    return int.from_bytes(blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest(), "little") >> 1
