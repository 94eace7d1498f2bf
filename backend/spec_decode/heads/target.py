"""`DenseTarget`: a target run over whole sequences without a KV cache, for what its draft heads read and learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional as F

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.errors import ConfigError
from backend.models.checkpoint import Checkpoint
from backend.models.decoder import Decoder
from backend.models.loader import load_model
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.sources import ModelSource
from backend.models.weight_slots import EMBEDDING
from backend.quantization.calibration import WindowAttention

_SHAPE_FIELDS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_HASHED_ROWS = 64


def target_fingerprint(source: ModelSource) -> str:
    """What a head must find unchanged in its target: its shape and, for a sample of its weights, parts of the embedding.

    A quantized checkpoint has that of the model that it was made of, whose head fits it. Raises `ConfigError` for a dummy.
    """
    if source.path is None:
        raise ConfigError(
            f"{source.name} has random weights, which no draft head can learn; name a model that has files"
        )
    shape = asdict(load_decoder_config(source.path))
    digest = blake2b(json.dumps([shape[name] for name in _SHAPE_FIELDS]).encode(), digest_size=16)
    with Checkpoint(source.path) as checkpoint:
        embedding = checkpoint.tensor(EMBEDDING)
        rows = embedding[:: max(1, len(embedding) // _HASHED_ROWS)]
        digest.update(rows.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def output_rows(model: Decoder, token_ids: Tensor) -> Tensor:
    """The rows of the output head that belong to `token_ids`, int64 [n]: [n, hidden] in the model's dtype.

    They come through the head: a weight that is packed, or laid out for the CPU, gives no rows.
    """
    weight = model.head.weight if hasattr(model.head, "weight") else None
    if isinstance(weight, Tensor):
        return weight.detach().index_select(0, token_ids)
    identity = torch.eye(model.config.hidden_size, dtype=model.embedding.dtype, device=model.embedding.device)
    return model.head(identity).index_select(1, token_ids).t().contiguous()


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Of sequences side by side."""

    features: Tensor  # float [num_sequences, length, num_features, hidden], behind the layers asked for
    last: Tensor  # float [num_sequences, length, hidden], after the final norm


class DenseTarget:
    """Sequences may be padded at their end: attention is causal, so nothing before the padding sees it."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.config: DecoderConfig = model.config
        self.embedding = model.embedding.detach()
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        empty = (0, 1, self.config.num_kv_heads, self.config.head_dim)
        self.no_cache = LayerCache.zeros(*empty, self.dtype, self.device)

    @classmethod
    def load(cls, source: ModelSource, device: torch.device) -> DenseTarget:
        """In bfloat16 on CUDA, in float32 on the CPU. Raises as `load_model`."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls(load_model(source, device=device, dtype=dtype).model)

    @torch.no_grad()
    def run(self, token_ids: Tensor, feature_layers: Sequence[int]) -> TargetStates:
        """Args:
        token_ids: int64 [num_sequences, length], at most the model's context long.
        feature_layers: each the number of layers behind which hidden states are kept, ascending.
        """
        model, (num_sequences, length) = self.model, token_ids.shape
        positions = torch.arange(length, device=self.device).repeat(num_sequences)
        metadata, attention = dense_metadata(num_sequences, positions), WindowAttention(length)
        hidden = F.embedding(token_ids.flatten(), self.embedding)
        kept = []
        for index, (layer, window) in enumerate(zip(model.layers, self.config.windows, strict=True), start=1):
            cache = replace(self.no_cache, window=window)
            hidden = layer(hidden, positions, model.cos_sin_cache, cache, metadata, attention)
            if index in feature_layers:
                kept.append(hidden)
        features = torch.stack(kept, dim=1) if kept else hidden.new_empty(len(hidden), 0, hidden.shape[1])
        shape = (num_sequences, length)
        return TargetStates(features.unflatten(0, shape), model.final_norm(hidden).unflatten(0, shape))


def dense_metadata(num_sequences: int, positions: Tensor) -> AttentionMetadata:
    """Of sequences of one length that no cache holds: block tables and slots are empty.

    Args:
        positions: int64 [num_sequences * length].
    """
    device, length = positions.device, len(positions) // num_sequences
    return AttentionMetadata(
        query_start_loc=torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length,
        seq_lens=torch.full((num_sequences,), length, dtype=torch.int32, device=device),
        block_table=torch.empty(num_sequences, 0, dtype=torch.int32, device=device),
        slot_mapping=positions.new_empty(0),
        positions=positions,
        num_decodes=0,
    )
