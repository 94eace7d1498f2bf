"""`speculative.*`: who drafts tokens, and how many."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from backend.settings import Section
from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree

MAX_SPECULATIVE_TOKENS = 32
MAX_TREE_TOKENS = 64  # of a request in a step in which some do not see others: a bit each


class SpeculativeSettings(Section):
    """Several tokens of a request in one step: a proposer drafts them, the model verifies all at once."""

    method: Literal["none", "ngram", "draft_model", "eagle", "medusa", "lookahead", "synthetic"] = Field(
        "none",
        description="Who drafts. none: nobody, one token a step. ngram: the text so far, what followed the last time its "
        "end occurred (prompt lookup). draft_model: a smaller model with the same tokenizer. eagle: a head of one layer on "
        "the model's hidden states. medusa: heads on its last hidden state, one for each token ahead. lookahead: n-grams "
        "that the model finds itself, by Jacobi iteration a few tokens ahead. synthetic: nobody, and drafts are accepted at a "
        "set rate, for times of dummy models.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="For draft_model: which one; by default the first third of the target's own layers. For eagle and "
        "medusa: the folder of the head; by default the one that comes for the model.",
    )
    num_speculative_tokens: int = Field(
        5, ge=1, le=MAX_SPECULATIVE_TOKENS, description="Most tokens of one draft; with a tree, of each of its paths."
    )
    tree: bool = Field(
        False,
        description="For eagle and medusa: draft a tree of likely continuations instead of the likeliest one alone, and verify "
        "all of its paths in one pass.",
    )
    adaptive: bool = Field(
        True,
        description="Draft fewer tokens, or none, where drafts are seldom accepted or too many requests decode; else always "
        "as many.",
    )
    ngram_max: int = Field(3, ge=1, le=16, description="For ngram: the longest end of the text that is looked up.")
    ngram_min: int = Field(1, ge=1, le=16, description="For ngram: the shortest.")
    # Fu et al. 2024 have 15 columns and n-grams of 5 for 7 billion parameters, and more for fewer: as many as a step holds.
    lookahead_window: int = Field(
        14,
        ge=1,
        le=MAX_TREE_TOKENS,
        description="For lookahead: places ahead at which tokens are guessed, each over again in every step.",
    )
    lookahead_ngram: int = Field(
        5,
        ge=2,
        le=16,
        description="For lookahead: tokens of the n-grams that are found. A step runs lookahead_window for each but one.",
    )
    synthetic_acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="For synthetic: chance of a drafted token to be accepted once those before it are.",
    )
    max_batch: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Nobody speculates while more requests than this decode; by default without limit.",
    )

    @model_validator(mode="before")
    @classmethod
    def _forget_what_was_null(cls, data: Any) -> Any:
        """Runs stored before there was speculation carry nulls, also for a `tree`."""
        if not isinstance(data, dict):
            return data
        nulls = ("method", "num_speculative_tokens", "tree")
        return {key: value for key, value in data.items() if not (key in nulls and value is None)}

    @model_validator(mode="after")
    def _ngrams_have_a_length(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min = {self.ngram_min} is above ngram_max = {self.ngram_max}")
        if self.model is not None and self.method not in ("draft_model", "eagle", "medusa"):
            raise ValueError(f"model = {self.model!r} belongs to method = 'draft_model', 'eagle' or 'medusa'")
        return self

    @model_validator(mode="after")
    def _trees_come_of_heads(self) -> Self:
        if self.tree and self.method not in DEFAULT_TREES:
            raise ValueError(f"tree = True belongs to method = {' or '.join(map(repr, DEFAULT_TREES))}")
        return self

    @property
    def draft_tree(self) -> DraftTree | None:
        """The method's own, up to the depth of `num_speculative_tokens`; None: chains are drafted."""
        return DEFAULT_TREES[self.method].cut(self.num_speculative_tokens) if self.tree else None

    @property
    def num_window_tokens(self) -> int:
        """Guesses that run beside each draft."""
        return self.lookahead_window * (self.lookahead_ngram - 1) if self.method == "lookahead" else 0

    @model_validator(mode="after")
    def _a_window_fits_its_mask(self) -> Self:
        num_tokens = 1 + self.num_speculative_tokens + self.num_window_tokens
        if self.num_window_tokens and num_tokens > MAX_TREE_TOKENS:
            raise ValueError(
                f"1 + num_speculative_tokens + lookahead_window x (lookahead_ngram - 1) = {num_tokens} tokens of a request in a "
                f"step; {MAX_TREE_TOKENS} are the most"
            )
        return self

    @model_validator(mode="after")
    def _synthetic_drafts_have_a_rate(self) -> Self:
        if self.method == "synthetic" and self.synthetic_acceptance is None:
            raise ValueError("method = 'synthetic' needs synthetic_acceptance, from 0 to 1")
        if self.method != "synthetic" and self.synthetic_acceptance is not None:
            raise ValueError(f"synthetic_acceptance = {self.synthetic_acceptance!r} belongs to method = 'synthetic'")
        return self
