"""Copies of whole KV blocks, with everything that a block holds in every layer: within the cache, and to other memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from backend.attention.metadata import LayerCache
from backend.config import EngineConfig
from backend.core.kv_groups import KVGroupSpec
from backend.core.swapping import num_host_blocks
from backend.errors import CapacityError
from backend.sample.metadata import copy_to

STAGING_BYTES = 2**26  # on the device, of a transfer under way


def copy_blocks(layer_caches: Sequence[LayerCache], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks within the cache, all at once: each source is read as it stands before.

    On CUDA this is queued on the current stream, and nothing waits for it.

    Args:
        copies: (source, destination) block ids, at least one; no destination twice.
    """
    block_ids = np.array(copies, dtype=np.int64).T.copy()
    sources, destinations = copy_to(block_ids, layer_caches[0].key_cache.device)
    for tensor in _pool_tensors(layer_caches):
        tensor.index_copy_(0, destinations, tensor.index_select(0, sources))


class BlockStore(Protocol):
    """Memory that holds blocks. A block in transit is a row of `width` int64 words."""

    @property
    def width(self) -> int: ...

    def read(self, block_ids: np.ndarray, rows: Tensor) -> None:
        """Put blocks, int64 [n], into `rows`, int64 [n, width] on the device, without waiting."""

    def write(self, block_ids: np.ndarray, rows: Tensor) -> None:
        """Take blocks from `rows`, without waiting."""


class DeviceBlocks:
    """The KV cache: a row is what a block holds of every tensor, one after the other."""

    def __init__(self, layer_caches: Sequence[LayerCache]) -> None:
        tensors = _pool_tensors(layer_caches)
        self._parts = [tensor.flatten(1).view(torch.uint8) for tensor in tensors]  # uint8 [num_blocks + 1, bytes]
        self._device = tensors[0].device

    @property
    def width(self) -> int:
        return -(-sum(part.shape[1] for part in self._parts) // 8)

    def read(self, block_ids: np.ndarray, rows: Tensor) -> None:
        ids = copy_to(block_ids, self._device)
        for part, columns in self._columns(rows):
            columns.copy_(part.index_select(0, ids))

    def write(self, block_ids: np.ndarray, rows: Tensor) -> None:
        ids = copy_to(block_ids, self._device)
        for part, columns in self._columns(rows):
            part.index_copy_(0, ids, columns)

    def _columns(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part with its place in the rows, both in the widest words that fit."""
        row_bytes, begin = rows.view(torch.uint8), 0
        for part in self._parts:
            columns = row_bytes[:, begin : begin + part.shape[1]]
            begin += part.shape[1]
            aligned = begin % 8 == part.shape[1] % 8 == 0
            yield (part.view(torch.int64), columns.view(torch.int64)) if aligned else (part, columns)


class HostBlocks:
    """Host memory, page-locked where the device is a card: one row a block."""

    def __init__(self, num_blocks: int, width: int, device: torch.device) -> None:
        """Raises `CapacityError` when the host has too little memory."""
        num_bytes = 8 * num_blocks * width
        try:
            if num_bytes > psutil.virtual_memory().available:
                raise RuntimeError  # the system would hand it out, and kill the process once it is used
            self.rows = torch.empty(num_blocks, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise CapacityError(
                f"the host cannot give {num_bytes / 2**20:,.1f} MiB for swapped requests; lower cache.swap_bytes, or set "
                "scheduler.preemption = 'recompute'"
            ) from error

    @classmethod
    def allocate(cls, config: EngineConfig, group: KVGroupSpec, blocks: DeviceBlocks) -> HostBlocks:
        """As many as `cache.swap_bytes` holds. Raises `CapacityError` when that is none, or more than the host has."""
        num_blocks = num_host_blocks(config, [group])
        if not num_blocks:
            raise CapacityError(
                f"cache.swap_bytes = {config.cache.swap_bytes:,} holds no block, which takes {8 * blocks.width:,} bytes; "
                "raise it, or set scheduler.preemption = 'recompute'"
            )
        return cls(num_blocks, blocks.width, torch.device(str(config.model.device)))

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    def read(self, block_ids: np.ndarray, rows: Tensor) -> None:
        for place, block_id, length in _runs(block_ids):
            rows[place : place + length].copy_(self.rows[block_id : block_id + length], non_blocking=True)

    def write(self, block_ids: np.ndarray, rows: Tensor) -> None:
        for place, block_id, length in _runs(block_ids):
            self.rows[block_id : block_id + length].copy_(rows[place : place + length], non_blocking=True)


@dataclass(frozen=True, slots=True)
class TransferHandle:
    """A transfer that has been queued. Work queued behind it on the same stream need not wait by itself."""

    done: torch.cuda.Event | None  # None: it is over

    def wait(self) -> None:
        """Hold up the host until the blocks are there."""
        if self.done is not None:
            self.done.synchronize()


class BlockTransfer:
    """Moves blocks between two stores over a device, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, block_ids: Sequence[tuple[int, int]], src: BlockStore, dst: BlockStore) -> TransferHandle:
        """Queue copies of blocks, without waiting.

        Args:
            block_ids: (id in `src`, id in `dst`); no destination twice.
        """
        if not block_ids:
            return TransferHandle(None)
        sources, destinations = np.array(block_ids, dtype=np.int64).T.copy()
        at_once = max(1, STAGING_BYTES // (8 * src.width))
        for begin in range(0, len(sources), at_once):
            part = slice(begin, begin + at_once)
            rows = torch.empty(len(sources[part]), src.width, dtype=torch.int64, device=self._device)
            src.read(sources[part], rows)
            dst.write(destinations[part], rows)
        if self._device.type != "cuda":
            return TransferHandle(None)
        done = torch.cuda.Event()
        done.record()
        return TransferHandle(done)


def _pool_tensors(layer_caches: Sequence[LayerCache]) -> list[Tensor]:
    """Each once: layers of different KV groups share them."""
    caches = {cache.key_cache.data_ptr(): cache for cache in layer_caches}
    return [tensor for cache in caches.values() for tensor in cache.tensors()]


def _runs(block_ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(place, first id, length) of stretches of consecutive ids: a copy for each."""
    ends = [*(np.flatnonzero(np.diff(block_ids) != 1) + 1).tolist(), len(block_ids)]
    begin = 0
    for end in ends:
        yield begin, int(block_ids[begin]), end - begin
        begin = end
