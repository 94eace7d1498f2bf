"""`KVCompaction`: accepted nodes of draft trees move to the slots behind their texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata, LayerCache
from kernels.reference.compact_kv_cache import compact_kv_cache


class KVCompaction:
    """Nothing here waits for the device but the constructor.

    Args:
        layer_caches: of the target's layers, and of a head's or a draft model's beside them.
        use_kernel: whether the Triton kernel moves them, one launch for each KV group.
    """

    def __init__(self, layer_caches: Sequence[LayerCache], *, use_kernel: bool) -> None:
        groups = sorted({cache.group for cache in layer_caches})
        self._caches = {
            group: [tensor for cache in layer_caches if cache.group == group for tensor in cache.tensors()]
            for group in groups
        }
        self._tables: dict[int, Tensor] | None = None
        if use_kernel:
            from kernels.ops.compact_kv_cache import cache_table

            self._tables = {group: cache_table(caches) for group, caches in self._caches.items()}

    def __call__(self, metadata: AttentionMetadata, root_indices: Tensor, accepted_nodes: Tensor) -> None:
        """Move the nodes that a row has accepted, i of them, to the places 1 to i behind its root's.

        Args:
            metadata: of the step that has run the trees, the nodes of each side by side.
            root_indices: int64 [num_rows], of the trees' roots among the step's tokens.
            accepted_nodes: int64 [num_rows, depth], as of `VerifiedTree`: ascending, then -1.
        """
        places = torch.arange(1, accepted_nodes.shape[1] + 1, device=accepted_nodes.device)
        is_accepted = accepted_nodes > 0
        nodes = torch.stack((accepted_nodes.where(is_accepted, 0), places.where(is_accepted, 0)))
        indices = root_indices[:, None] + nodes
        for group, caches in self._caches.items():
            slots = metadata.of_group(group).slot_mapping[indices]
            sources, targets = slots.where(is_accepted, 0)  # elsewhere the null block's first slot stays what it is
            if self._tables is None:
                compact_kv_cache(caches, sources, targets)
            else:
                from kernels.ops.compact_kv_cache import compact_kv_cache as launch

                launch(caches, sources, targets, table=self._tables[group])
