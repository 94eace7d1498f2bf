"""What a verified round leaves for the next step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.settle_round import settle_round
from kernels.specs.gather_round import round_sources

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 6 of 257": {"num_rows": 1, "k": 5, "num_batch_rows": 257},
    "32 x 9 of 257": {"num_rows": 32, "k": 8, "num_batch_rows": 257},
}


def make_inputs(
    dtype: torch.dtype, device: torch.device, seed: int = 0, *, num_rows: int = 4, k: int = 3, num_batch_rows: int = 9
) -> Inputs:
    """Distinct rows, in no order, each with 0 to k drafts of which it accepts some. `dtype` says nothing: there are no floats."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    counts = random(k + 1, num_rows)
    num_accepted = (random(k + 1, num_rows, 1) - 1).clamp(min=0).minimum(counts[:, None])
    columns = torch.arange(k + 1, device=device)
    token_ids = random(128_256, num_rows, k + 1).where(columns <= num_accepted, -1)
    ids = torch.cat((token_ids, num_accepted, (random(8, num_rows, 1) > 0).long(), random(128_256, num_rows, k)), dim=1)
    return {
        "ids": ids,
        "rows": torch.randperm(num_batch_rows, device=device, generator=generator)[:num_rows],
        "starts": (counts + 1).cumsum(0) - counts - 1,
        "sources": round_sources(counts, k),
        "last_token_ids": random(128_256, num_batch_rows),
        "num_computed": random(8192, num_rows) - 1,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Per row its tokens, their number, where it stands and begins in, its last token and where that is out, its length both.

    Per token its place in and what follows it out.
    """
    num_rows, width = inputs["ids"].shape
    return 8 * num_rows * ((width - 1) // 2 + 1 + 2 + 2 + 2) + 16 * len(inputs["sources"])


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="settle_round",
    reference=settle_round,
    make_inputs=make_inputs,
    # Ids are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"last_token_ids", "num_computed"}),
)
