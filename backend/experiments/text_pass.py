"""A text run through a model, teacher forced: as one request over a KV cache of its own, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from backend.config import EngineConfig
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_format import KV_FORMATS
from backend.core.speculation import refuse_synthetic
from backend.errors import CapacityError, ConfigError
from backend.models.sources import ModelSource

if TYPE_CHECKING:
    from torch import Tensor

    from backend.attention.backend import AttentionBackend
    from backend.attention.metadata import LayerCache
    from backend.models.loader import LoadedModel
    from backend.worker.decoders import StepDecoder
    from backend.worker.kv_cache import KVCacheShape

CHUNK = 512  # tokens of a step
ROWS = 64  # whose distributions are held at once


@dataclass(frozen=True, slots=True)
class TextModel:
    """A loaded model, and what runs a text through it.

    Attributes:
        shape: of a KV cache in `cache.dtype`, all layers in one group.
    """

    name: str
    loaded: LoadedModel
    decoder: StepDecoder
    attention: AttentionBackend
    shape: KVCacheShape
    device: Literal["cuda", "cpu"]

    def through_modules(self) -> TextModel:
        """The same model run by its own modules in plain torch, which can be looked into and exchanged on the way."""
        from backend.attention.reference import ReferenceAttention
        from backend.worker.decoders import ReferenceDecoder

        return replace(self, decoder=ReferenceDecoder(self.loaded.model), attention=ReferenceAttention())

    def allocate(self, num_tokens: int) -> list[LayerCache]:
        """A cache for that many tokens, which later texts can use again. Raises `CapacityError`."""
        import torch

        caches = self.shape.allocate(-(-num_tokens // self.shape.block_size), torch.device(self.device))
        windows = self.loaded.config.windows
        return [replace(cache, window=window) for cache, window in zip(caches, windows, strict=True)]

    def run(self, token_ids: Sequence[int], caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states [num_tokens, hidden] of a text from its first token, for `decoder.compute_logits`."""
        import torch

        ids = torch.tensor(token_ids, device=self.device)
        steps = [
            forward_chunk(self.decoder, self.attention, ids[start:end], start, caches, self.shape.block_size)
            for start, end in chunks(len(ids))
        ]
        return torch.cat(steps)


def load_text_model(source: ModelSource, config: EngineConfig) -> TextModel:
    """Load a model as an engine of this config would; settings of scheduling have no meaning here.

    Raises `ConfigError`, `ModelError` or `CapacityError`.
    """
    import torch

    from backend.models.loader import load_model
    from backend.worker.decoders import make_decoder
    from backend.worker.device import choose_device
    from backend.worker.kv_cache import KVCacheShape
    from backend.worker.model_runner import DTYPES
    from backend.worker.out_of_memory import is_out_of_memory

    refuse_synthetic(config, "quality")
    device = choose_device(config)
    resolved = config.resolve(device=device, max_model_len=2**31 - 1)
    dtype = DTYPES[resolved.model.dtype]
    if device == "cpu" and config.kernels.cpu_threads:
        torch.set_num_threads(config.kernels.cpu_threads)
    try:
        loaded = load_model(source, device=torch.device(device), dtype=dtype, quantization=config.quantization)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"{source.name} does not fit the GPU in {resolved.model.dtype}: choose a smaller model or free the card"
        ) from None
    shape, kv_format = loaded.config, KV_FORMATS[config.cache.dtype]
    if problem := kv_format.problem(shape.head_dim):
        raise ConfigError(f"cache.dtype = {config.cache.dtype!r}: {problem}")
    group = KVGroupSpec(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype.itemsize, format=kv_format)
    decoder, attention = make_decoder(loaded.model, resolved.kernels)
    cache_shape = KVCacheShape(group, resolved.cache.block_size, dtype)
    return TextModel(source.name, loaded, decoder, attention, cache_shape, device)


def chunks(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each step."""
    return pairwise([*range(0, num_tokens, CHUNK), num_tokens])


def forward_chunk(
    decoder: StepDecoder,
    attention: AttentionBackend,
    token_ids: Tensor,
    start: int,
    caches: Sequence[LayerCache],
    block_size: int,
) -> Tensor:
    """One request's next tokens, whose blocks lie in order: hidden states [num_tokens, hidden].

    Args:
        token_ids: int64 [num_tokens].
        start: position of the first of them; the cache holds those before.
    """
    import torch

    from backend.attention.metadata import AttentionMetadata

    device, end = token_ids.device, start + len(token_ids)
    positions = torch.arange(start, end, device=device)
    zeros = torch.zeros_like(token_ids)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, len(token_ids)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        block_table=1 + torch.arange(-(-end // block_size), dtype=torch.int32, device=device)[None],
        slot_mapping=block_size + positions,
        positions=positions,
        num_decodes=int(len(token_ids) == 1),
    )
    return decoder.forward(token_ids, zeros, zeros[:1], caches, metadata, attention)


def compare(plain: Tensor, other: Tensor) -> Tensor:
    """float32 [2, rows] of log probabilities [rows, vocab_size]: KL(plain || other), and whether their largest is the same."""
    import torch

    divergence = (plain.exp() * (plain - other)).sum(dim=-1)
    return torch.stack((divergence, (plain.argmax(dim=-1) == other.argmax(dim=-1)).float()))
