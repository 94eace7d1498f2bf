"""Moving tokens between slots of the paged cache."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.compact_kv_cache import compact_kv_cache

SHAPES: dict[str, dict[str, Any]] = {
    "5 of 26 in 60 caches of 3 x 64": {"num_caches": 60, "num_rows": 1},
    "16 x 5 of 26 in 60 caches of 3 x 64": {"num_caches": 60, "num_rows": 16},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_caches: int = 4,
    num_rows: int = 3,
    num_moves: int = 5,
    tree_size: int = 26,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
) -> Inputs:
    """Trees in scattered blocks behind the null block; some nodes of each, in order, go to its beginning. One is padding."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks_per_tree = -(-tree_size // block_size)
    num_blocks = 1 + num_rows * blocks_per_tree
    blocks = 1 + torch.randperm(num_blocks - 1, device=device, generator=generator).view(num_rows, blocks_per_tree)
    nodes = (
        torch.rand(num_rows, tree_size, device=device, generator=generator)
        .argsort(dim=1)[:, :num_moves]
        .sort(dim=1)
        .values
    )
    places = torch.arange(num_moves, device=device).expand(num_rows, -1)
    sources, targets = (
        blocks.gather(1, place // block_size) * block_size + place % block_size for place in (nodes, places)
    )
    sources[0], targets[0] = 0, 0
    shape = (num_caches, num_blocks, block_size, num_kv_heads, head_dim)
    return {
        "caches": torch.randn(shape, dtype=dtype, device=device, generator=generator),
        "source_slots": sources,
        "target_slots": targets,
    }


def bytes_moved(inputs: Inputs) -> int:
    """The slots, and every moved one in and out."""
    num_moved = int((inputs["source_slots"] != inputs["target_slots"]).sum())
    moved = 2 * num_moved * sum(cache[0, 0].nbytes for cache in inputs["caches"])
    return moved + inputs["source_slots"].nbytes + inputs["target_slots"].nbytes


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="compact_kv_cache",
    reference=compact_kv_cache,
    make_inputs=make_inputs,
    # Bytes are copied, so they are equal.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"caches"}),
    waits=True,  # it makes the table of its caches
)
