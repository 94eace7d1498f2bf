"""How far the values in a model reach: weights, activations, keys and values, attention logits, over the start of a text.

What reaches further, or has a heavier tail, leaves a grid of few codes less for the rest. "weights < activations < KV <
attention logits" is the order that is commonly expected; `order` gives the one that is found. Often it is a single channel
that reaches so far: each range names the one that its largest value is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from backend.experiments.layer_error import KINDS, dense_weight
from backend.experiments.quality import ProgressCallback, check_text
from backend.experiments.text_pass import TextModel, forward_chunk

if TYPE_CHECKING:
    from torch import Tensor, nn

    from backend.attention.backend import AttentionBackend
    from backend.attention.metadata import AttentionMetadata, LayerCache

WEIGHTS, ACTIVATIONS, KV, LOGITS = "weights", "activations", "KV", "attention logits"
EXPECTED_ORDER = (WEIGHTS, ACTIVATIONS, KV, LOGITS)
MOST_TOKENS = 1024  # that are looked at: attention logits are as many as pairs of them


@dataclass(frozen=True, slots=True)
class Range:
    """Of the values of one place.

    Attributes:
        group: one of `EXPECTED_ORDER`.
        part: a kind of linear layer, whose weight or input it is; "keys", turned by their positions, or "values", before
            a cache rounds them; "scores", scaled, of the pairs that attention looks at.
        p999: 99.9th percentile of the absolute values, by linear interpolation.
        kurtosis: E[(x - mean)^4] / var^2, which is 3 for a normal distribution; None where all values are equal.
        outlier: where the largest value is, counted from 0: of weights the "output" and "input" of the layer, outputs of
            projections side by side counted through in the order of `part`'s name (queries, keys, values; gate, up); of
            activations the "input"; of keys and values the KV "head" and the "channel" in it; of scores the query "head".
    """

    group: str
    layer: int
    part: str
    max_abs: float
    p999: float
    kurtosis: float | None
    outlier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GroupRange:
    """A group over all layers: the largest value and where it is, and the medians of the rest."""

    group: str
    max_abs: float
    layer: int
    part: str
    p999: float
    kurtosis: float | None
    outlier: Mapping[str, int]


def measure_ranges(
    model: TextModel,
    token_ids: Sequence[int],
    *,
    window: int = 1024,
    max_tokens: int | None = None,
    on_progress: ProgressCallback = lambda *_: None,
) -> list[Range]:
    """Of every layer, over the first window of the text, in one step of 1,024 tokens at most.

    Raises `ConfigError` for a text or a window that `measure_quality` refuses too.
    """
    import torch

    read = check_text(token_ids, [model], window=window, stride=window, max_tokens=max_tokens)
    read = read[: min(window, MOST_TOKENS)]
    runner = model.through_modules()
    decoder = model.loaded.model
    found: list[Range] = []
    with torch.inference_mode(), ExitStack() as hooks:
        dtype = decoder.final_norm.weight.dtype
        for layer in range(len(decoder.layers)):
            on_progress("measuring weights", layer, len(decoder.layers))
            for kind, name in KINDS.items():
                module = decoder.get_submodule(f"layers.{layer}.{name}")
                found.append(_range(WEIGHTS, layer, kind, dense_weight(module, dtype), ("output", "input")))
                hooks.callback(module.register_forward_pre_hook(_InputProbe(found, layer, kind)).remove)
        ids = torch.tensor(read, device=model.device)
        attention = _AttentionProbe(
            runner.attention, found, lambda layer: on_progress("measuring activations", layer, len(decoder.layers))
        )
        caches = runner.allocate(len(read))
        forward_chunk(runner.decoder, attention, ids, 0, caches, runner.shape.block_size)
    on_progress("measuring activations", len(decoder.layers), len(decoder.layers))
    return sorted(found, key=lambda each: (EXPECTED_ORDER.index(each.group), each.layer))


def summarize_ranges(ranges: Sequence[Range]) -> list[GroupRange]:
    """In the order of `EXPECTED_ORDER`."""
    groups = []
    for group in EXPECTED_ORDER:
        members = [each for each in ranges if each.group == group]
        largest = max(members, key=lambda each: each.max_abs)
        kurtoses = [each.kurtosis for each in members if each.kurtosis is not None]
        groups.append(
            GroupRange(
                group,
                largest.max_abs,
                largest.layer,
                largest.part,
                median(each.p999 for each in members),
                median(kurtoses) if kurtoses else None,
                largest.outlier,
            )
        )
    return groups


def order(groups: Sequence[GroupRange]) -> list[str]:
    """Groups by their 99.9th percentile, ascending."""
    return [each.group for each in sorted(groups, key=lambda each: each.p999)]


class _InputProbe:
    """A hook before a linear layer."""

    def __init__(self, found: list[Range], layer: int, kind: str) -> None:
        self._found, self._layer, self._kind = found, layer, kind

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._found.append(_range(ACTIVATIONS, self._layer, self._kind, inputs[0], (None, "input")))


class _AttentionProbe:
    """Looks at queries, keys and values on their way into the attention of a text's only step, layer by layer."""

    def __init__(self, attention: AttentionBackend, found: list[Range], on_layer: Callable[[int], None]) -> None:
        self._attention, self._found, self._on_layer = attention, found, on_layer
        self._layer = 0

    def write(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        layer, self._layer = self._layer, self._layer + 1
        self._on_layer(layer)
        self._found.append(_range(KV, layer, "keys", key, (None, "head", "channel")))
        self._found.append(_range(KV, layer, "values", value, (None, "head", "channel")))
        self._found.append(_range(LOGITS, layer, "scores", _scores(query, key, layer_cache.window), ("head", None)))
        return self._attention.write(query, key, value, layer_cache, metadata)

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        return self._attention.forward(query, layer_cache, metadata, scale)


def _scores(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """float32 [num_heads, num_pairs] of [num_tokens, heads, head_dim]: q k / sqrt(head_dim) of the pairs that are not masked."""
    import torch

    num_tokens, num_heads, head_dim = query.shape
    keys = key.float().repeat_interleave(num_heads // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * head_dim**-0.5
    distance = torch.arange(num_tokens, device=query.device)
    distance = distance[:, None] - distance
    seen = (distance >= 0) & (distance < (window or num_tokens))
    return scores[:, seen]


def _range(group: str, layer: int, part: str, values: Tensor, axes: Sequence[str | None]) -> Range:
    """Args:
    values: of any dtype and shape, an axis for each of `axes`, which names those that an outlier is told by.
    """
    import torch

    shape, values = values.shape, values.float().flatten()
    sizes = values.abs()
    largest = torch.unravel_index(sizes.argmax(), shape)
    centred = values.double() - values.double().mean()
    variance = float(centred.square().mean())
    return Range(
        group,
        layer,
        part,
        max_abs=float(sizes.max()),
        p999=_percentile(sizes, 0.999),
        kurtosis=float(centred.pow(4).mean()) / variance**2 if variance else None,
        outlier={axis: int(index) for axis, index in zip(axes, largest, strict=True) if axis is not None},
    )


def _percentile(values: Tensor, share: float) -> float:
    """By linear interpolation; torch's own takes no more than 16 million values."""
    position = share * (len(values) - 1)
    top = values.topk(len(values) - int(position)).values  # descending, down to the value below the position
    low, high = float(top[-1]), float(top[max(0, len(top) - 2)])
    return low + (high - low) * (position - int(position))
