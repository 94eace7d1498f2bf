"""How many KV blocks a device can hold, and the tensors that hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from backend.attention.metadata import LayerCache
from backend.core.kv_format import KVFormat
from backend.core.kv_groups import KVGroupSpec, LayerGroup
from backend.errors import CapacityError


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The KV groups of a model laid out in the blocks of one pool.

    A block belongs to one group at a time, and has its slots in tensors that serve one layer of each group.
    """

    group: KVGroupSpec  # the shape of each
    block_size: int
    dtype: torch.dtype  # the model's
    layer_groups: tuple[LayerGroup, ...] = ()  # none: one group of all layers, without a window

    @property
    def bytes_per_block(self) -> int:
        return self.group.bytes_per_token * self.block_size

    def with_format(self, kv_format: KVFormat) -> KVCacheShape:
        """The same vectors, stored so."""
        return replace(self, group=replace(self.group, format=kv_format))

    def blocks_in(self, num_bytes: int, what: str) -> int:
        """Usable blocks that fit beside the null block. Raises `CapacityError` when not one does."""
        num_blocks = num_bytes // self.bytes_per_block - 1
        if num_blocks < 1:
            raise CapacityError(
                f"{what} leaves {max(0, num_bytes):,} bytes for the KV cache, but one block of {self.block_size} tokens takes "
                f"{self.bytes_per_block:,} and two are the least; raise it, or lower cache.block_size"
            )
        return num_blocks

    def allocate(self, num_blocks: int, device: torch.device) -> list[LayerCache]:
        """One `LayerCache` per layer of the model. Raises `CapacityError` when the device has no room."""
        needed = (num_blocks + 1) * self.bytes_per_block
        # A CPU would hand out the memory and kill the process once it is used.
        if device.type == "cpu" and needed > psutil.virtual_memory().available:
            raise self._too_large(num_blocks)
        try:
            caches = [
                LayerCache.zeros(
                    num_blocks,
                    self.block_size,
                    self.group.num_kv_heads,
                    self.group.head_dim,
                    self.dtype,
                    device,
                    self.group.format,
                )
                for _ in range(self.group.num_layers)
            ]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise self._too_large(num_blocks) from error
        layers = {
            layer: replace(cache, group=group, window=window)
            for group, (window, members) in enumerate(self.layer_groups)
            for layer, cache in zip(members, caches, strict=False)
        }
        return [layers[layer] for layer in sorted(layers)] or caches

    def _too_large(self, num_blocks: int) -> CapacityError:
        return CapacityError(
            f"the KV cache of {num_blocks:,} blocks needs {(num_blocks + 1) * self.bytes_per_block / 2**20:,.1f} MiB, more "
            "than the device can give; lower cache.num_blocks, cache.gpu_memory_utilization or cache.cpu_bytes"
        )
