"""What kernels and references are held against, and the guard bands laid around their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.kv_oracle import decoded

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
HEADS = [(1, 1), (9, 3), (14, 2), (12, 4), (24, 1), (32, 8)]  # query heads, KV heads
# The interpreter multiplies bfloat16 matrices wrongly, without a word.
KERNEL_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def in_turn(shapes: Sequence[tuple[Any, ...]]) -> list[Any]:
    """(dtype, *shape): float32 and float16 by turns, whose paths differ in their casts alone; bfloat16 with every shape."""
    interpreted = [(KERNEL_DTYPES[index % 2], *shape) for index, shape in enumerate(shapes)]
    return interpreted + bfloat16_with(shapes)


def bfloat16_with(shapes: Iterable[tuple[Any, ...]]) -> list[Any]:
    """(bfloat16, *shape), on a GPU."""
    return [pytest.param(torch.bfloat16, *shape, marks=pytest.mark.gpu) for shape in shapes]


def naive_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    tree_mask: None = None,
    tree_starts: None = None,
) -> Tensor:
    """The definition in float64, without trees: per row and head, look up each visible position's slot, weigh and sum."""
    query = query.detach().double().cpu()
    key_cache, value_cache = decoded(key_cache, key_scales), decoded(value_cache, value_scales)
    output = torch.zeros_like(query)
    block_size, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    for r, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[r : r + 2].tolist()
        table = block_table[r].tolist()
        slots = [(table[j // block_size], j % block_size) for j in range(seq_len)]
        keys, values = ([cache[block, offset] for block, offset in slots] for cache in (key_cache, value_cache))
        for row in range(start, end):
            position = seq_len - (end - start) + (row - start)
            first = 0 if window is None else max(0, position - window + 1)
            seen_keys, seen_values = (torch.stack(t[first : position + 1]) for t in (keys, values))
            for head in range(query.shape[1]):
                weights = torch.softmax(scale * (seen_keys[:, head // group] @ query[row, head]), dim=0)
                output[row, head] = weights @ seen_values[:, head // group]
    return output


def chunked(length: int, chunk: int) -> tuple[list[int], list[int]]:
    """query_lens and seq_lens of a prompt of `length` run `chunk` rows at a time."""
    ends = [*range(chunk, length, chunk), length]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)], ends


def start_loc(query_lens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)


@dataclass
class GuardBands:
    """Tensors that lie between two bands of `value`: a write outside shows in the band, a read of NaN in the result."""

    value: float = float("nan")
    size: int = 512
    _bands: list[Tensor] = field(default_factory=list)

    def wrap(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, contiguous, with bands before and after it."""
        inner = self.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return inner.copy_(tensor)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * self.size,), self.value, dtype=dtype, device=device)
        self._bands += [buffer[: self.size], buffer[self.size + count :]]
        return buffer[self.size : self.size + count].view(*shape)

    def assert_untouched(self) -> None:
        assert self._bands
        for band in self._bands:
            torch.testing.assert_close(band, torch.full_like(band, self.value), rtol=0, atol=0, equal_nan=True)
