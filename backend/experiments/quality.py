"""How well a model predicts a text, and how far its predictions lie from those of a reference.

Perplexity is exp of the mean negative log likelihood of the scored tokens (nats), over windows of a fixed length as in
transformers' guide to the perplexity of fixed-length models: windows begin every `stride` tokens, each token is scored in
the first window that reaches it, and the first token of a window is never scored, as nothing comes before it. Tokens are those
of the text alone; none is put before a window.

Beside a reference, over the same tokens: the KL divergence of its next-token distribution from the model's, KL(reference ||
model) in nats; the share of positions where both have the same likeliest token; and delta p, the mean of p_model(token) -
p_reference(token) in percent, with its standard error sqrt(var / (n - 1)), as llama.cpp's perplexity tool prints it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from backend.config import EngineConfig
from backend.errors import CapacityError, ConfigError, ModelError
from backend.experiments.text_pass import ROWS, TextModel, compare, load_text_model
from backend.models.sources import ModelSource

if TYPE_CHECKING:
    from torch import Tensor

    from backend.attention.metadata import LayerCache

ProgressCallback = Callable[[str, float, float], None]  # what, done, in all


@dataclass(frozen=True, slots=True)
class Divergences:
    """KL(reference || model) of next-token distributions in nats; percentiles by linear interpolation."""

    mean: float
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a model on a text; what compares it is None without a reference.

    Attributes:
        num_tokens: that were scored.
        top1_agreement: share of them where both models' likeliest token is the same.
        delta_p: in percent, as `delta_p_standard_error` (None for a single token).
    """

    perplexity: float
    num_tokens: int
    kl: Divergences | None = None
    top1_agreement: float | None = None
    delta_p: float | None = None
    delta_p_standard_error: float | None = None
    reference_perplexity: float | None = None


@dataclass(frozen=True, slots=True)
class RememberedModel(TextModel):
    """A reference that runs each text once: its hidden states, kept on the device, are those of all comparisons."""

    states: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: TextModel) -> Self:
        return cls(**{name: getattr(model, name) for name in TextModel.__slots__})

    def run(self, token_ids: Sequence[int], caches: Sequence[LayerCache]) -> Tensor:
        key = tuple(token_ids)
        if key not in self.states:
            self.states[key] = TextModel.run(self, token_ids, caches)
        return self.states[key]


class Window(NamedTuple):
    """Tokens `start` to `end` are read, those from `first_scored` on are scored."""

    start: int
    end: int
    first_scored: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Cut a text as transformers' guide does. A last window whose only token is its first is left out."""
    end = 0
    for start in range(0, num_tokens, stride):
        first_scored, end = max(end, start + 1), min(start + window, num_tokens)
        if first_scored < end:
            yield Window(start, end, first_scored)
        if end == num_tokens:
            return


def load_pair(
    source: ModelSource, config: EngineConfig, reference: tuple[ModelSource, EngineConfig] | None
) -> tuple[TextModel, TextModel | None]:
    """Both models beside each other, which the comparison needs. Raises as `load_text_model`."""
    other = load_text_model(*reference) if reference is not None else None
    try:
        return load_text_model(source, config), other
    except CapacityError as error:
        if other is None:
            raise
        raise CapacityError(f"{source.name} does not fit beside its reference {other.name}: {error}") from None


def check_text(
    token_ids: Sequence[int], models: Sequence[TextModel], *, window: int, stride: int, max_tokens: int | None = None
) -> list[int]:
    """The tokens to read: the first `max_tokens`, or all. Raises `ConfigError` for what cannot be measured."""
    if window < 2:
        raise ConfigError(f"a window of {window} tokens is too short: the first one is not scored, two are the least")
    if not 1 <= stride <= window:
        raise ConfigError(f"a stride of {stride:,} tokens is impossible; allowed: 1 to the window, {window:,}")
    for model in models:
        context = model.loaded.config.max_position_embeddings
        if window > context:
            raise ConfigError(f"a window of {window:,} tokens is above the context of {model.name}, {context:,} tokens")
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError(f"{max_tokens} tokens are too few to read: the first one is not scored, two are the least")
    read = list(token_ids[:max_tokens])
    if len(read) < 2:
        raise ConfigError(f"the text has {len(read)} tokens; the first one is not scored, two are the least")
    sizes = {model.loaded.config.vocab_size: model.name for model in models}
    if len(sizes) > 1:
        named = " and ".join(f"{name} has {size:,} tokens" for size, name in sizes.items())
        raise ConfigError(f"model and reference differ in their vocabularies: {named}")
    return read


def measure_quality(
    model: TextModel,
    token_ids: Sequence[int],
    *,
    reference: TextModel | None = None,
    window: int = 1024,
    stride: int = 1024,
    max_tokens: int | None = None,
    on_progress: ProgressCallback = lambda *_: None,
) -> Quality:
    """Score a text by a model, and by a reference beside it.

    Args:
        token_ids: the text, in the vocabulary that both models have.
        window: tokens read at once.
        stride: tokens between the beginnings of two windows.
        max_tokens: of the text that are read. The first of each window is among them and is not scored, so that 8,192
            in windows of 1,024 score 8 x 1,023.
        on_progress: called with what is done, tokens read, and tokens to read.
    Raises:
        ConfigError: the text, the window or the stride cannot be measured.
        ModelError: a model's logits are not finite.
        CapacityError: the device has no room for the caches.
    """
    import torch

    models = [model] if reference is None else [model, reference]
    read = check_text(token_ids, models, window=window, stride=stride, max_tokens=max_tokens)
    caches = [each.allocate(min(window, len(read))) for each in models]
    parts: list[Tensor] = []
    with torch.inference_mode():
        for start, end, first_scored in windows(len(read), window, stride):
            on_progress("scoring", start, len(read))
            targets = read[first_scored:end]
            # The state at a position predicts the token after it.
            hidden = [
                each.run(read[start : end - 1], cache)[-len(targets) :]
                for each, cache in zip(models, caches, strict=True)
            ]
            parts += score(models, hidden, targets)
    on_progress("scoring", len(read), len(read))
    return summarize(torch.cat(parts, dim=1))


def score(models: Sequence[TextModel], hidden: Sequence[Tensor], targets: Sequence[int]) -> Iterator[Tensor]:
    """What the models give for tokens, some at a time.

    Args:
        models: one, or a model and its reference.
        hidden: [num_tokens, hidden] of each, at the positions before the tokens.
    Yields:
        float32 [k, rows] on the CPU. First the log probability of the token; of a pair then the reference's, the KL
        divergence, and 1 where both have the same likeliest token.
    """
    import torch

    for start in range(0, len(targets), ROWS):
        rows = slice(start, start + ROWS)
        distributions = [_log_probabilities(each, states[rows]) for each, states in zip(models, hidden, strict=True)]
        device = distributions[0].device
        token_ids = torch.tensor(targets[rows], device=device)[:, None]
        distributions = [each.to(device) for each in distributions]
        found = [each.gather(1, token_ids).T for each in distributions]
        if len(distributions) > 1:
            found.append(compare(distributions[1], distributions[0]))
        yield torch.cat(found).cpu()


def summarize(scores: Tensor) -> Quality:
    """Args:
    scores: float32 [1 or 4, num_tokens], as `score` gives them.
    """
    import numpy as np

    own, *others = scores.double().numpy()
    quality = Quality(perplexity=_perplexity(own.mean()), num_tokens=len(own))
    if not others:
        return quality
    reference, divergence, same = others
    p50, p99 = np.percentile(divergence, (50, 99))
    delta = 100 * (np.exp(own) - np.exp(reference))
    return Quality(
        perplexity=quality.perplexity,
        num_tokens=quality.num_tokens,
        kl=Divergences(float(divergence.mean()), float(p50), float(p99), float(divergence.max())),
        top1_agreement=float(same.mean()),
        delta_p=float(delta.mean()),
        delta_p_standard_error=float(delta.std() / math.sqrt(len(delta) - 1)) if len(delta) > 1 else None,
        reference_perplexity=_perplexity(reference.mean()),
    )


def _log_probabilities(model: TextModel, hidden: Tensor) -> Tensor:
    """float32 [rows, vocab_size]."""
    logits = model.decoder.compute_logits(hidden)
    if not logits.isfinite().all():
        raise ModelError(
            f"{model.name}: its logits are not finite: a value overflowed in its dtype, or a weight is damaged"
        )
    return logits.log_softmax(dim=-1)


def _perplexity(mean_log_probability: float) -> float:
    """Raises `ModelError` where it is above what a float holds."""
    try:
        return math.exp(-mean_log_probability)
    except OverflowError:
        raise ModelError(
            "the perplexity is above 1e308: the model's predictions have nothing to do with the text"
        ) from None
