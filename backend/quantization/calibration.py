"""Calibration: what comes into each linear layer of a model on a text, one decoder layer after the other.

The text that ships, `data/calibration.txt`, was made for this: prose, dialogue, letters, instructions, lists, tables and
numbers written for the project, and Python of the project's own. No benchmark's text is in it.

Peak memory is one layer in float32, the hidden states of all windows, and a layer's statistics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.errors import ConfigError
from backend.layers.rotary import build_cos_sin_cache
from backend.models.decoder import DecoderLayer
from backend.models.model_config import DecoderConfig

DEFAULT_TEXT = Path(__file__).with_name("data") / "calibration.txt"
_TEXT_FIELDS = ("text", "prompt")
_TOKENS_AT_ONCE = 4096


def read_texts(path: Path) -> list[str]:
    """The whole of a text file, or what the lines of a `.jsonl` file have in `text` or `prompt`. Raises `ConfigError`."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: of other bytes, and of a path with a NUL in it
        shown = str(path).replace("\0", "\\0")
        raise ConfigError(f"{shown} cannot be read as UTF-8 text: {error}") from None
    if path.suffix.lower() != ".jsonl":
        return [content]
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):  # of all line ends, JSON's strings may have the others
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            texts.append(next(record[field] for field in _TEXT_FIELDS if isinstance(record.get(field), str)))
        except (ValueError, AttributeError, StopIteration, RecursionError):
            raise ConfigError(f"{path}, line {number}: no JSON object with a string in text or prompt") from None
    return texts


def cut_windows(token_ids: list[int], num_windows: int, length: int, seed: int) -> Tensor:
    """Spread windows evenly over the tokens, each moved at random within its share; they overlap where tokens are few.

    Returns:
        int64 [num_windows, length], the same for the same arguments.
    Raises:
        ConfigError: there are fewer tokens than one window has.
    """
    if len(token_ids) < length:
        raise ConfigError(
            f"the calibration text has {len(token_ids):,} tokens, fewer than the {length:,} of one window; "
            "give a longer text or a smaller window length"
        )
    moved = torch.rand(num_windows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    share = (len(token_ids) - length + 1) / num_windows
    starts = ((torch.arange(num_windows) + moved) * share).long()
    return torch.tensor(token_ids)[starts[:, None] + torch.arange(length)]


@dataclass(slots=True)
class InputStats:
    """Of the inputs x of a linear layer over all tokens.

    Attributes:
        hessian: float32 [in_features, in_features], the mean of x^T x: of the squared error of its outputs, by its weights.
        mean_abs: float32 [in_features], of |x|.
    """

    hessian: Tensor
    mean_abs: Tensor

    def scaled(self, scales: Tensor) -> InputStats:
        """Of x / scales, [in_features]."""
        return InputStats(self.hessian / torch.outer(scales, scales), self.mean_abs / scales)

    def squared_error(self, difference: Tensor) -> float:
        """The mean over tokens of |x D^T|^2, of a float32 matrix D [out_features, in_features]."""
        return float(((difference @ self.hessian) * difference).sum(dtype=torch.float64))


class WindowAttention:
    """An `AttentionBackend` without a cache: every window is a request of its own, all its tokens in one step."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._key_value: tuple[Tensor, Tensor] | None = None

    def write(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        self._key_value = (self._by_head(key), self._by_head(value))
        return query

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        assert self._key_value is not None
        window, mask = layer_cache.window, None
        if window is not None and window < self._length:
            distance = metadata.positions[: self._length, None] - metadata.positions[None, : self._length]
            mask = (distance >= 0) & (distance < window)
        attended = F.scaled_dot_product_attention(
            self._by_head(query), *self._key_value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1)

    def _by_head(self, rows: Tensor) -> Tensor:
        """[num_windows, heads, length, head_dim]."""
        return rows.unflatten(0, (-1, self._length)).transpose(1, 2)


class LayerRunner:
    """Runs a decoder layer over all windows."""

    def __init__(self, config: DecoderConfig, length: int, device: torch.device) -> None:
        """Raise `ConfigError` for windows above the model's context."""
        if length > config.max_position_embeddings:
            raise ConfigError(
                f"a window of {length:,} tokens is above the model's context, {config.max_position_embeddings:,} tokens"
            )
        self._attention = WindowAttention(length)
        self._cos_sin_cache = build_cos_sin_cache(replace(config, max_position_embeddings=length), device)
        self._positions = torch.arange(length, device=device)
        self._cache = LayerCache.zeros(0, 1, config.num_kv_heads, config.head_dim, torch.float32, device)

    @torch.inference_mode()
    def run(self, layer: DecoderLayer, hidden: Tensor, window: int | None) -> Iterator[Tensor]:
        """Yield the outputs, float32 [some windows, length, hidden size], for inputs [num_windows, length, hidden size].

        Args:
            window: tokens that the layer attends to; None: all.
        """
        length = hidden.shape[1]
        for inputs in hidden.split(max(1, _TOKENS_AT_ONCE // length)):
            positions = self._positions.repeat(len(inputs))
            metadata = _metadata(len(inputs), length, positions)
            outputs = layer(
                inputs.flatten(0, 1),
                positions,
                self._cos_sin_cache,
                replace(self._cache, window=window),
                metadata,
                self._attention,
            )
            yield outputs.view_as(inputs)

    def collect(
        self, layer: DecoderLayer, modules: Mapping[str, int], hidden: Tensor, window: int | None
    ) -> dict[str, InputStats]:
        """What comes into linear modules of the layer.

        Args:
            modules: name -> number of inputs.
        """
        with _collecting(layer, modules, hidden.device) as stats:
            for _ in self.run(layer, hidden, window):
                pass
        num_tokens = hidden.shape[0] * hidden.shape[1]
        for each in stats.values():
            each.hessian /= num_tokens
            each.mean_abs /= num_tokens
        return stats

    def advance(self, layer: DecoderLayer, hidden: Tensor, window: int | None) -> None:
        """Replace the hidden states by the layer's outputs."""
        first = 0
        for outputs in self.run(layer, hidden, window):
            hidden[first : first + len(outputs)] = outputs
            first += len(outputs)


@contextmanager
def _collecting(
    layer: DecoderLayer, modules: Mapping[str, int], device: torch.device
) -> Iterator[dict[str, InputStats]]:
    """Sums over all tokens that go through the layer meanwhile."""
    stats = {
        name: InputStats(torch.zeros(size, size, device=device), torch.zeros(size, device=device))
        for name, size in modules.items()
    }

    def add(to: InputStats, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        to.hessian.addmm_(x.t(), x)
        to.mean_abs += x.abs().sum(0)

    hooks = [layer.get_submodule(name).register_forward_pre_hook(partial(add, to)) for name, to in stats.items()]
    try:
        yield stats
    finally:
        for hook in hooks:
            hook.remove()


def _metadata(num_windows: int, length: int, positions: Tensor) -> AttentionMetadata:
    """Of requests that no cache holds: their block tables and slots are empty."""
    device = positions.device
    return AttentionMetadata(
        query_start_loc=torch.arange(num_windows + 1, dtype=torch.int32, device=device) * length,
        seq_lens=torch.full((num_windows,), length, dtype=torch.int32, device=device),
        block_table=torch.empty(num_windows, 0, dtype=torch.int32, device=device),
        slot_mapping=positions.new_empty(0),
        positions=positions,
        num_decodes=0,
    )
