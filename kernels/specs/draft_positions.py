"""Where the tokens stand that are drafted behind a verified round."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.draft_positions import draft_positions

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 6 of 256 blocks": {"num_reqs": 1, "num_drafts": 5, "max_num_blocks": 256},
    "32 x 6 of 512 blocks, 2 groups": {"num_reqs": 32, "num_drafts": 5, "max_num_blocks": 512, "num_groups": 2},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_reqs: int = 7,
    num_drafts: int = 3,
    max_num_blocks: int = 5,
    num_groups: int = 2,
    block_size: int = 16,
) -> Inputs:
    """Rounds of 0 drafts and more, any number of them accepted; the last request is padding. `dtype` says nothing."""
    generator = torch.Generator(device).manual_seed(seed)

    def below(bound: torch.Tensor) -> torch.Tensor:
        return (torch.rand(num_reqs, device=device, generator=generator) * bound).long()

    is_request = torch.arange(num_reqs, device=device) < max(1, num_reqs - 1)
    longest = torch.tensor(max_num_blocks * block_size, device=device)
    counts = below(torch.tensor(num_drafts + 1, device=device)) * is_request
    seq_lens = (counts + 1 + below(longest - counts)) * is_request
    starts = (counts + 1).cumsum(0) * is_request
    num_entries = num_groups * num_reqs * max_num_blocks
    block_ids = torch.randperm(num_entries, device=device, generator=generator) + 1
    return {
        "starts": starts,
        "counts": counts,
        "last_indices": starts + below(counts + 1),
        "seq_lens": seq_lens.int(),
        "block_tables": block_ids.int().view(num_groups, num_reqs, max_num_blocks),
        "num_passes": num_drafts + 1,
        "block_size": block_size,
        "max_model_len": int(max_num_blocks * block_size),
    }


def bytes_moved(inputs: Inputs) -> int:
    """What is known of each request in; lengths and positions out, and for each group a block id in and a slot out."""
    num_reqs, num_tokens = len(inputs["starts"]), inputs["num_passes"] * len(inputs["starts"])
    return 28 * num_reqs + (12 + 12 * len(inputs["block_tables"])) * num_tokens


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="draft_positions",
    reference=draft_positions,
    make_inputs=make_inputs,
    # Integers are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
