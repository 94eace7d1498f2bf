"""KV memory that holds no token: one contiguous reservation per request against blocks (Kwon et al. 2023, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.analysis.kv_size import count_of


@dataclass(frozen=True, slots=True)
class KVReservation:
    """Slots (of one token in all layers) that a layout holds for its requests: used + reserved_unused + internal."""

    used: int  # hold a token
    reserved_unused: int  # kept for tokens that may never come
    internal: int  # behind the last token of a request's last block
    arithmetic: str

    @property
    def reserved(self) -> int:
        return self.used + self.reserved_unused + self.internal

    @property
    def wasted_share(self) -> float | None:
        """Of the reserved slots, 0…1; None without requests."""
        return (self.reserved_unused + self.internal) / self.reserved if self.reserved else None


@dataclass(frozen=True, slots=True)
class MemoryWaste:
    contiguous: KVReservation  # max_model_len slots per request
    paged: KVReservation  # whole blocks per request
    saved_share: float | None  # of the contiguous reservation, 0…1; None without requests


def memory_waste(seq_lens: Sequence[int], max_model_len: int, block_size: int) -> MemoryWaste:
    """What both layouts hold for requests that are `seq_lens` tokens long at this moment.

    Args:
        seq_lens: tokens in the cache, one per request; 0 for a request that has been admitted and computed nothing.
        max_model_len: tokens that a contiguous reservation must be ready for.
        block_size: tokens.

    Raises:
        ValueError: a limit is below 1, or a length is negative or above `max_model_len`.
    """
    for name, value in (("max_model_len", max_model_len), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} {value} is below 1")
    for length in seq_lens:
        if not 0 <= length <= max_model_len:
            raise ValueError(f"a request of {length} tokens is not within 0 and max_model_len {max_model_len:,}")
    num_reqs, used = len(seq_lens), sum(seq_lens)
    num_blocks = sum(-(-length // block_size) for length in seq_lens)
    contiguous, paged = num_reqs * max_model_len, num_blocks * block_size
    return MemoryWaste(
        contiguous=KVReservation(
            used,
            contiguous - used,
            0,
            f"{count_of(num_reqs, 'request')} × {max_model_len:,} slots − {used:,} tokens = {contiguous - used:,}"
            f"{_share(contiguous - used, contiguous)}",
        ),
        paged=KVReservation(
            used,
            0,
            paged - used,
            f"{count_of(num_blocks, 'block')} × {block_size:,} slots − {used:,} tokens = {paged - used:,}"
            f"{_share(paged - used, paged)}",
        ),
        saved_share=1 - paged / contiguous if contiguous else None,
    )


def _share(wasted: int, reserved: int) -> str:
    return f" ({wasted / reserved:.1%} of {reserved:,})" if reserved else ""
