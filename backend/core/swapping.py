"""`scheduler.preemption = swap`: the KV of a preempted request waits in host memory, and need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence

from backend.config import EngineConfig
from backend.core.block_hash import BlockHash, extend_block_hashes, prefix_key
from backend.core.block_pool import NULL_BLOCK
from backend.core.kv_blocks import ComputedBlocks
from backend.core.kv_cache_manager import KVCacheManager
from backend.core.kv_groups import KVGroupSpec
from backend.core.swap_space import SwapSpace
from backend.request import NEVER, Request


class SwappingKVCacheManager(KVCacheManager):
    """Full blocks that are known by their content, those of the prefix cache or shared by samples, go out only once.

    What the prefix cache still has of a request when it comes back is found there, and not copied.

    Args:
        num_host_blocks: of all groups together.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroupSpec],
        prefix_key: BlockHash | None,
        num_host_blocks: int,
        *,
        max_num_batched_tokens: int = NEVER,
    ) -> None:
        super().__init__(num_blocks, block_size, groups, prefix_key, max_num_batched_tokens=max_num_batched_tokens)
        self.swap_space = SwapSpace(num_host_blocks)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        num_tokens = request.num_computed_tokens
        num_blocks = -(-num_tokens // self.block_size)
        held = [blocks[:num_blocks] for blocks in self._block_ids[request.request_id]]
        if self.windows.slides:
            held = self.windows.within_reach(held, num_tokens)
        copies = self.swap_space.put(request.request_id, num_tokens, held, self._known_hashes(request))
        if copies is not None and self._release(request):
            copied = [block_id for block_id, _ in copies]
            self._log("swap_out", copied, request, num_tokens=num_tokens, even_if_empty=True)
        return copies

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        best = super().get_computed_blocks(request)
        num_tokens = self.swap_space.num_tokens_of(request.request_id)
        if num_tokens <= best.num_tokens:
            return best
        found = (best if best.origin == "cache" else self._prefixes.find(request, self.pool)).block_ids
        return ComputedBlocks(self.windows.within_reach(found, num_tokens), num_tokens, "swap")

    def take_computed_blocks(self, request: Request, computed: ComputedBlocks) -> list[tuple[int, int]]:
        if computed.origin != "swap":
            self.swap_space.drop(request.request_id)
            return super().take_computed_blocks(request, computed)
        num_found = len(computed.block_ids[0])
        found = ComputedBlocks(computed.block_ids, num_found * self.block_size, "cache")
        super().take_computed_blocks(request, found)
        host_ids = self.swap_space.take(request.request_id)
        if self.allocate_slots(request, computed.num_tokens - found.num_tokens, kind="swap_in") is None:
            raise RuntimeError("the pool refused blocks that it had counted as free")
        request.num_computed_tokens = computed.num_tokens
        return [
            pair
            for sources, blocks in zip(host_ids, self._block_ids[request.request_id], strict=True)
            for pair in zip(sources[num_found:], blocks[num_found:], strict=True)
            if pair[1] != NULL_BLOCK
        ]

    def free(self, request: Request) -> None:
        super().free(request)
        self.swap_space.drop(request.request_id)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.swap_space.check_integrity()

    def _known_hashes(self, request: Request) -> list[list[BlockHash]]:
        """Of the full blocks, where another request may have the same: one per block and group."""
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if self._prefixes.is_on:
            self._prefixes.hash(request, num_full)
            return [hashes[:num_full] for hashes in request.block_hashes]
        named: list[list[BlockHash]] = [[] for _ in range(self._num_groups)]
        if request.parent_id is not None:
            for group, hashes in enumerate(named):
                key = prefix_key(samples_of=request.parent_id, group=group)
                extend_block_hashes(hashes, request.token_ids, num_full, self.block_size, key)
        return named


def num_host_blocks(config: EngineConfig, groups: Sequence[KVGroupSpec]) -> int:
    """Blocks that `cache.swap_bytes` has room for, of all groups together; 0 without swapping."""
    if config.scheduler.preemption != "swap":
        return 0
    return config.cache.swap_bytes // (max(group.bytes_per_token for group in groups) * config.cache.block_size)
