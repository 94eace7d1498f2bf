"""What a certificate is asked for. No torch."""

from __future__ import annotations

from pydantic import Field

from backend.config import DEFAULT_MODEL, EngineConfig
from backend.core.speculation import refuse_synthetic
from backend.errors import ConfigError
from backend.sampling_params import SamplingParams
from backend.settings import Settings

# Chosen by experiment on a sampler over eight tokens with a fault built in, which is found at this size with a power of 0.99 and
# more: a lower bound, with 99 % confidence. Of a fault that begins with the third drafted token, which only rounds with room for
# it can show, it is 0.85. That is no measure of what so many samples find in another model.
DEFAULT_NUM_SAMPLES = 4096
# Short, and going on in more ways than one: n-grams are found in them, and sampled tokens keep to them or do not. The first two
# are sampled.
DEFAULT_PROMPTS = (
    "red green blue red green blue red green blue red green",
    "apple, pear, plum, apple, pear, plum, apple, pear,",
    "The cat sat on the mat. The dog sat on the rug. The cat sat on the mat. The dog sat on the",
    "She said yes. He said no. She said yes. He said no. She said",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in range(",
    "1 2 3 4 1 2 3 4 1 2 3 4 1 2",
    "To be, or not to be, that is the question. To be, or not to",
    "The largest planet of the solar system is",
)


class CertificateConfig(Settings):
    """Which engine, and how much of it is compared with plain decoding."""

    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="A pulled model, a Hugging Face folder, or dummy:<shape>."
    )
    engine: EngineConfig = Field(EngineConfig(), description="With a `speculative.method`; its model is `model`.")
    prompts: str | None = Field(
        None, description="A JSONL file with a `prompt` in each line, continued as it is; by default eight that ship."
    )
    num_sampled_prompts: int = Field(2, ge=1, le=64, description="The first prompts, which are sampled as well.")
    num_samples: int = Field(DEFAULT_NUM_SAMPLES, ge=20, le=2**20, description="By each of both, over all prompts.")
    max_tokens: int = Field(48, ge=1, le=4096, description="Of a greedy answer.")
    temperature: float = Field(
        1.0, ge=0.01, le=1e6, allow_inf_nan=False, description="Of sampled answers, as the next."
    )
    top_k: int = Field(20, ge=-1, description="Keep the k likeliest tokens; -1 or 0 keeps all.")
    top_p: float = Field(0.95, gt=0, le=1, description="Keep the smallest set of tokens with this probability.")
    seed: int = Field(0, ge=0, lt=2**62)
    significance: float = Field(
        1e-4, gt=0, lt=0.5, description="Chance that an engine without a fault is rejected by its samples."
    )

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def speculative_engine(self) -> EngineConfig:
        """It drafts wherever it can: what is left out where it would lose is not compared. Raises `ConfigError` where there is
        nothing to certify.
        """
        if self.engine.speculative.method == "none":
            raise ConfigError(
                "there is no speculation to certify: set speculative.method, as in speculative.method=ngram"
            )
        refuse_synthetic(self.engine, "exactness that a certificate could test")
        return self.engine.with_overrides({"model.name": self.model, "speculative.adaptive": False})

    @property
    def longest_draft(self) -> int:
        """Tokens that a round can accept: of a chain, or of the deepest path of a tree."""
        settings = self.engine.speculative
        return settings.num_speculative_tokens if settings.draft_tree is None else settings.draft_tree.depth

    @property
    def plain_engine(self) -> EngineConfig:
        """The same without speculation."""
        return EngineConfig.from_dict({**self.speculative_engine.to_dict(), "speculative": {}})
