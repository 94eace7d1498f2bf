"""What fits a card beside the weights: how many requests of a length, and how long a single one."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from backend.analysis.kv_size import KVBlocks, KVSize, count_of, in_gib


@dataclass(frozen=True, slots=True)
class RequestsThatFit:
    """How many requests of one length the KV cache holds at once, each with all its blocks."""

    num_tokens: int  # prompt + output
    num_requests: int
    bytes_per_request: int  # whole blocks
    arithmetic: str


@dataclass(frozen=True, slots=True)
class LongestContext:
    """The longest single request, prompt and output together."""

    num_tokens: int | None  # None: a model of windows alone, whose config names no limit, is never too long
    limited_by: Literal["memory", "max_position_embeddings"] | None
    arithmetic: str


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A card's share divided among weights, a reserve for activations, and KV blocks."""

    card_bytes: int
    gpu_memory_utilization: float
    weight_bytes: int
    activation_bytes: int
    blocks: KVBlocks

    @property
    def share_bytes(self) -> int:
        return int(self.card_bytes * self.gpu_memory_utilization)

    @property
    def kv_bytes(self) -> int:
        """What is left for usable KV blocks; negative by as much as the rest is too large.

        One block is padding (the null block) and serves no request.
        """
        return self.share_bytes - self.weight_bytes - self.activation_bytes - self.blocks.bytes_per_block

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        return max(0, self.kv_bytes // self.blocks.bytes_per_block)

    @property
    def arithmetic(self) -> str:
        return (
            f"{self.gpu_memory_utilization:g} × {self.card_bytes:,} − {self.weight_bytes:,} weights "
            f"− {self.activation_bytes:,} activations − {self.blocks.bytes_per_block:,} null block "
            f"= {self.kv_bytes:,} bytes ({in_gib(self.kv_bytes)})"
        )

    def requests_of(self, prompt_tokens: int, output_tokens: int) -> RequestsThatFit:
        """Requests that fit at their full length. They are not that long at once, so more may run before one must wait.

        The last output token counts, though its key and value are never computed.

        Raises:
            ValueError: a length is below 1.
        """
        for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            if value < 1:
                raise ValueError(f"{name} {value} is below 1")
        length = prompt_tokens + output_tokens
        each = self.blocks.request_bytes(length)
        count = max(0, self.kv_bytes // each)
        terms = zip(self.blocks.request_blocks(length), self.blocks.group_block_bytes, strict=True)
        blocks = [f"{count_of(number, 'block')} × {size:,} bytes" for number, size in terms]
        return RequestsThatFit(
            num_tokens=length,
            num_requests=count,
            bytes_per_request=each,
            arithmetic=f"{' + '.join(blocks)} = {each:,} a request; "
            f"{self.kv_bytes:,} / {each:,} = {count_of(count, 'request')}",
        )

    def longest_context(self) -> LongestContext:
        """The longest request that fits alone, or that the model's positions allow where that is less."""
        positions = self.blocks.kv.shape.max_position_embeddings
        limit = self._tokens_that_fit()
        if positions is not None and (limit is None or limit >= positions):
            words = "without bound, as every layer has a window" if limit is None else f"{limit:,} tokens"
            return LongestContext(
                positions, "max_position_embeddings", f"memory: {words}; max_position_embeddings: {positions:,}"
            )
        if limit is None:
            return LongestContext(None, None, "every layer has a window, which fits at any length")
        used = self.blocks.request_bytes(limit) if limit else 0
        return LongestContext(
            limit, "memory", f"{limit:,} tokens take {used:,} of {self.kv_bytes:,} bytes, one more needs another block"
        )

    def _tokens_that_fit(self) -> int | None:
        """None where the memory sets no limit."""
        full = [
            size
            for group, size in zip(self.blocks.kv.groups, self.blocks.group_block_bytes, strict=True)
            if group.window is None
        ]
        block_size = self.blocks.block_size
        if full:
            most = max(0, self.kv_bytes // sum(full)) * block_size
        else:
            # Two blocks past the widest window no request grows any more.
            most = max(group.window or 0 for group in self.blocks.kv.groups) + 2 * block_size
            if self.blocks.request_bytes(most) <= self.kv_bytes:
                return None
        return bisect_right(range(1, most + 1), self.kv_bytes, key=self.blocks.request_bytes)


def card_memory(
    kv: KVSize,
    *,
    card_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
) -> CardMemory:
    """Divide a card's memory.

    Args:
        kv: from `kv_size`.
        card_bytes: all of the card's memory.
        weight_bytes: resident weights, as `read_weights(config).num_bytes(dtype).total` gives them.
        activation_bytes: reserve for the largest step's activations, CUDA graphs and the process' context.
        gpu_memory_utilization: share of the card that the engine may use, above 0 and at most 1.
        block_size: tokens.

    Raises:
        ValueError: a value is outside its range.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization {gpu_memory_utilization} is not above 0 and at most 1")
    for name, value, least in (
        ("card_bytes", card_bytes, 1),
        ("weight_bytes", weight_bytes, 0),
        ("activation_bytes", activation_bytes, 0),
    ):
        if value < least:
            raise ValueError(f"{name} {value} is below {least}")
    return CardMemory(card_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, kv.blocks(block_size))
