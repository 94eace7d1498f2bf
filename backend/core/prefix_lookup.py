"""What the prefix cache has of a request."""

from __future__ import annotations

from backend.core.block_hash import BlockHash, extend_block_hashes
from backend.core.block_pool import BlockPool
from backend.core.kv_blocks import ComputedBlocks
from backend.core.kv_windows import KVWindows
from backend.request import Request


class PrefixLookup:
    """Args:
    prefix_key: root of all chains of hashes, see `block_hash.prefix_key`; None: there is no prefix cache.
    """

    def __init__(self, prefix_key: BlockHash | None, num_groups: int, block_size: int, windows: KVWindows) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._windows = windows
        # A chain for each group: the same tokens have other KV there.
        self._keys = [prefix_key + bytes([group]) for group in range(num_groups)] if prefix_key is not None else []

    @property
    def is_on(self) -> bool:
        return bool(self._keys)

    def hash(self, request: Request, num_blocks: int) -> None:
        """Let `request.block_hashes` hold those of so many full blocks."""
        if not request.block_hashes:
            request.block_hashes = [[] for _ in self._keys]
        for hashes, key in zip(request.block_hashes, self._keys, strict=True):
            extend_block_hashes(hashes, request.token_ids, num_blocks, self._block_size, key)

    def find(self, request: Request, pool: BlockPool) -> ComputedBlocks:
        """The most blocks with which the request can begin; its last token is never among theirs."""
        num_blocks = (request.num_tokens - 1) // self._block_size if self._keys else 0
        self.hash(request, num_blocks)
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        if self._windows.slides and num_blocks:
            known = [[pool.lookup(block_hash) for block_hash in hashes[:num_blocks]] for hashes in request.block_hashes]
            hit = self._windows.longest_hit(known)
            found = self._windows.within_reach([blocks[:hit] for blocks in known], hit * self._block_size)
        else:
            for index in range(num_blocks):
                block_ids = [pool.lookup(hashes[index]) for hashes in request.block_hashes]
                if None in block_ids:
                    break
                for blocks, block_id in zip(found, block_ids, strict=True):
                    blocks.append(block_id)  # pyright: ignore[reportArgumentType]
        return ComputedBlocks(found, len(found[0]) * self._block_size, "cache")
