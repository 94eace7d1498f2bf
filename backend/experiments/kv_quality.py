"""What a quantized KV cache costs in quality: next-token distributions beside those over a cache in the model's own dtype.

The same tokens go through the model once over each cache (teacher forced), a chunk at a time, and every position's two
distributions are compared by their KL divergence. As all positions are causal, one pass over the longest length holds the
shorter ones. Keys are looked at head by head on the way: where a few channels are far larger than the rest, their scale
leaves the rest few codes (Liu et al., "KIVI", 2024, arXiv:2402.02750).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from backend.config import EngineConfig
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_format import KV_FORMATS, PLAIN
from backend.errors import ConfigError
from backend.experiments.text_pass import ROWS, chunks, compare, forward_chunk, load_text_model
from backend.models.sources import ModelSource

if TYPE_CHECKING:
    from torch import Tensor

    from backend.attention.backend import AttentionBackend
    from backend.attention.metadata import LayerCache
    from backend.worker.decoders import StepDecoder
    from backend.worker.kv_cache import KVCacheShape

QUANTIZED = tuple(name for name, kv_format in KV_FORMATS.items() if kv_format.num_scales)
LAST = 128  # positions that have the whole of a length before them
LARGEST_ERROR = 0.45  # of what a head's channels vary by, see `KVQuality.warnings`


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(model's own dtype || quantized) of next-token distributions, in nats, over the first `num_tokens` positions."""

    num_tokens: int
    mean: float
    last: float  # mean of the last 128 of them
    largest: float
    top1_agreement: float  # share of positions where both choose the same token


@dataclass(frozen=True, slots=True)
class KeyHead:
    """The keys of one KV head, over all positions. None where the median channel is always 0, or always the same.

    Attributes:
        outlier_ratio: root mean square of the largest channel over that of the median one.
        channel: the largest one.
        errors: by KV dtype, of the median channel: root mean square of what quantizing changes, over the median standard
            deviation. A large channel's own error does not count: in fp8 it is large, and no larger beside the channel.
    """

    layer: int
    kv_head: int
    outlier_ratio: float | None
    channel: int
    errors: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class KVQuality:
    divergences: dict[str, list[Divergence]]  # by KV dtype, one per length
    heads: list[KeyHead]

    def warnings(self) -> list[str]:
        """A sentence for each head whose keys err so much that it may break the model alone: by 0.01 nats of KL or more.

        That is a quarter of what the whole int4 cache of SmolLM2-135M costs, all 180 of its key and value heads together
        (0.041 nats over 512 tokens of WikiText-2, float32). Measured there by quantizing the keys of one head only, of 36
        heads in turn, to int4 (374 runs), int8 or fp8 (24), after the largest channel of its keys was multiplied by 1 to 64
        and that of its queries divided by as much, which leaves the model as it is. KL is that over the unquantized cache:

            error          runs   KL, median   largest   0.01 or more   least agreement of the first choice
            below 0.3       145       0.0003    0.0030              0                                 95.9 %
            0.3 to 0.45      55       0.0012    0.0093              0                                 94.9 %
            0.45 to 0.6      44       0.0026    0.0148              3                                 93.0 %
            0.6 to 1         58       0.0067    0.0217             15                                 92.8 %
            1 to 1.5         40       0.0172    0.1156             32                                 84.0 %
            above 1.5        56       0.0363    0.2249             55                                 79.3 %

        The most sensitive head comes to 0.01 nats at an error of 0.45 to 0.5, half of them by 1.1, one not at all. Unchanged, the
        worst int4 head errs by 0.26 (8,192 tokens) or 0.29 (512) and costs 0.0009 nats alone; Gaussian keys err by 0.09.
        """
        return [
            f"layer {head.layer}, KV head {head.kv_head}: {kv_dtype} keys err by {error:.0%} of what its channels vary by; "
            f"channel {head.channel} is {head.outlier_ratio:.1f} times as large as the median one"
            for head in self.heads
            for kv_dtype, error in head.errors.items()
            if error is not None and not error <= LARGEST_ERROR
        ]


def measure_model_kv_quality(
    source: ModelSource,
    token_ids: Sequence[int],
    *,
    device: Literal["cuda", "cpu"],
    kv_dtypes: Sequence[str] = QUANTIZED,
    lengths: Sequence[int] = (512, 2048),
) -> tuple[KVQuality, KVGroupSpec]:
    """`measure_kv_quality` of a model that is loaded for it; the quality, and the model's KV group in its own dtype.

    Raises as that does, and `ConfigError` for a model with attention windows, whose caches have several groups, or for a
    length above its context.
    """
    model = load_text_model(source, EngineConfig().with_overrides({"model.device": device}))
    config = model.loaded.config
    if any(config.windows):
        raise ConfigError(
            f"{source.name} attends within a window; this measures models that attend to their whole context"
        )
    if max(lengths) > config.max_position_embeddings:
        raise ConfigError(
            f"a length of {max(lengths):,} tokens is above the context of {source.name}, "
            f"{config.max_position_embeddings:,} tokens"
        )
    quality = measure_kv_quality(
        model.decoder, model.attention, model.shape, token_ids, device=device, kv_dtypes=kv_dtypes, lengths=lengths
    )
    return quality, model.shape.group


def measure_kv_quality(
    decoder: StepDecoder,
    attention: AttentionBackend,
    shape: KVCacheShape,
    token_ids: Sequence[int],
    *,
    device: str,
    kv_dtypes: Sequence[str] = QUANTIZED,
    lengths: Sequence[int] = (512, 2048),
) -> KVQuality:
    """Run the first tokens of a text over a plain cache and over each quantized one.

    Args:
        shape: of the model's plain cache.
        token_ids: as many as the longest length, or more.
        lengths: in tokens, each above 128.
    Raises:
        ConfigError: there are fewer tokens than the longest length, a length is too short, or a KV dtype cannot hold the
            model's heads.
        CapacityError: the device has no room for the caches.
    """
    import torch

    lengths = sorted(lengths)
    if lengths[0] <= LAST:
        raise ConfigError(f"a length of {lengths[0]} tokens is too short to measure at; more than {LAST} are needed")
    if len(token_ids) < lengths[-1]:
        raise ConfigError(f"the text has {len(token_ids):,} tokens, and the longest length is {lengths[-1]:,}")
    for kv_dtype in kv_dtypes:
        if problem := KV_FORMATS[kv_dtype].problem(shape.group.head_dim):
            raise ConfigError(f"cache.dtype = {kv_dtype!r}: {problem}")
    names = (PLAIN.name, *kv_dtypes)
    num_blocks = -(-lengths[-1] // shape.block_size)
    caches = {name: shape.with_format(KV_FORMATS[name]).allocate(num_blocks, torch.device(device)) for name in names}
    ids = torch.tensor(token_ids[: lengths[-1]], device=device)
    parts: dict[str, list[Tensor]] = {name: [] for name in kv_dtypes}  # float32 [2, rows]: KL, same choice
    with torch.inference_mode():
        for start, end in chunks(len(ids)):
            hidden = {
                name: forward_chunk(decoder, attention, ids[start:end], start, caches[name], shape.block_size)
                for name in names
            }
            for rows in torch.arange(end - start, device=device).split(ROWS):
                plain = decoder.compute_logits(hidden[PLAIN.name][rows]).log_softmax(dim=-1)
                for name in kv_dtypes:
                    parts[name].append(compare(plain, decoder.compute_logits(hidden[name][rows]).log_softmax(dim=-1)))
        heads = [
            head
            for layer, cache in enumerate(caches[PLAIN.name])
            for head in _key_heads(layer, cache, len(ids), kv_dtypes)
        ]
    return KVQuality({name: _at_lengths(torch.cat(parts[name], dim=1), lengths) for name in kv_dtypes}, heads)


def _at_lengths(compared: Tensor, lengths: Sequence[int]) -> list[Divergence]:
    return [
        Divergence(
            num_tokens=length,
            mean=float(compared[0, :length].mean()),
            last=float(compared[0, length - LAST : length].mean()),
            largest=float(compared[0, :length].max()),
            top1_agreement=float(compared[1, :length].mean()),
        )
        for length in lengths
    ]


def _key_heads(layer: int, cache: LayerCache, num_tokens: int, kv_dtypes: Sequence[str]) -> Iterator[KeyHead]:
    """Of the keys in a plain cache, which begin in block 1."""
    from kernels.reference.kv_quantization import DTYPES, dequantize, quantize, rotate

    keys = cache.key_cache[1:].flatten(0, 1)[:num_tokens].float()  # [num_tokens, num_kv_heads, head_dim]
    errors = {}
    for name in kv_dtypes:
        stored = rotate(keys) if KV_FORMATS[name].rotates_keys else keys
        changed = (dequantize(*quantize(stored, DTYPES[name])) - stored).square().mean(dim=0).sqrt()
        signal = keys.std(dim=0, correction=0)
        errors[name] = _quotients(changed.median(dim=-1).values, signal.median(dim=-1).values)
    channels = keys.square().mean(dim=0).sqrt()
    ratios = _quotients(channels.amax(dim=-1), channels.median(dim=-1).values)
    for kv_head, (ratio, channel) in enumerate(zip(ratios, channels.argmax(dim=-1).tolist(), strict=True)):
        yield KeyHead(layer, kv_head, ratio, channel, {name: errors[name][kv_head] for name in kv_dtypes})


def _quotients(values: Tensor, divisors: Tensor) -> list[float | None]:
    """None where there is nothing to divide by."""
    pairs = zip((values / divisors).tolist(), divisors.tolist(), strict=True)
    return [quotient if divisor else None for quotient, divisor in pairs]
