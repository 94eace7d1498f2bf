"""Keeping sampled tokens for the next step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.record_tokens import record_tokens

SHAPES: dict[str, dict[str, Any]] = {
    "1 of 257": {"num_sampled": 1, "num_rows": 257, "grows": False},
    "256 of 257": {"num_sampled": 256, "num_rows": 257, "grows": False},
    "256 of 257, lengths too": {"num_sampled": 256, "num_rows": 257},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_sampled: int = 7,
    num_rows: int = 9,
    grows: bool = True,
) -> Inputs:
    """Distinct rows, in no order; about one token in eight has no usable logits. There are no floats: `dtype` says nothing.

    Args:
        grows: whether there are lengths; about one in eight is 0.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, count: int = num_sampled) -> Tensor:
        return torch.randint(high, (count,), device=device, generator=generator)

    return {
        "token_ids": random(128_256),
        "finite": random(8) > 0,
        "rows": torch.randperm(num_rows, device=device, generator=generator)[:num_sampled],
        "sampled_token_ids": random(128_256, num_rows),
        "seq_lens": (random(1000) * (random(8) > 0)).int() if grows else None,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Token, row and flag in; the token to its row and to the host's copy; lengths in and out."""
    per_token = 33 if inputs["seq_lens"] is None else 33 + 8
    return per_token * len(inputs["token_ids"])


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="record_tokens",
    reference=record_tokens,
    make_inputs=make_inputs,
    # Ids are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"sampled_token_ids", "seq_lens"}),
)
