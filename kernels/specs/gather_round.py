"""The tokens of a step that verifies drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.gather_round import gather_round

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 6 of 257": {"num_rows": 1, "k": 5, "num_batch_rows": 257},
    "32 x 9 of 257": {"num_rows": 32, "k": 8, "num_batch_rows": 257},
}


def make_inputs(
    dtype: torch.dtype, device: torch.device, seed: int = 0, *, num_rows: int = 4, k: int = 3, num_batch_rows: int = 9
) -> Inputs:
    """Distinct rows, in no order, each with 0 to k drafts; behind the tokens comes padding, which is the first place.

    There are no floats: `dtype` says nothing.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    return {
        "last_token_ids": random(128_256, num_batch_rows),
        "drafts": random(128_256, num_batch_rows, k),
        "rows": torch.randperm(num_batch_rows, device=device, generator=generator)[:num_rows],
        "sources": round_sources(random(k + 1, num_rows), k),
    }


def round_sources(num_draft_tokens: Tensor, k: int) -> Tensor:
    """Of int64 [num_rows]: the places of a round's tokens in its matrix, row by row, and 0 behind them."""
    num_rows = len(num_draft_tokens)
    is_token = torch.arange(k + 1, device=num_draft_tokens.device) <= num_draft_tokens[:, None]
    places = is_token.view(-1).nonzero()[:, 0]
    return torch.nn.functional.pad(places, (0, num_rows * (k + 1) - len(places)))


def bytes_moved(inputs: Inputs) -> int:
    """Per row its number and its last token in, and its drafts in and out; per token its place in and its id out."""
    num_rows, k = len(inputs["rows"]), inputs["drafts"].shape[1]
    return num_rows * (16 + 16 * k) + 16 * len(inputs["sources"])


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="gather_round",
    reference=gather_round,
    make_inputs=make_inputs,
    # Ids are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
