"""The likeliest token of each row."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.greedy_tokens import greedy_tokens

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 151936": {"num_rows": 1, "vocab_size": 151_936},
    "64 x 128256": {"num_rows": 64, "vocab_size": 128_256},
    "256 x 128256": {"num_rows": 256, "vocab_size": 128_256},
    "8 x 49152": {"num_rows": 8, "vocab_size": 49_152},
    "1 x 16384 of a draft": {"num_rows": 1, "vocab_size": 16_384, "is_draft": True},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 5,
    vocab_size: int = 4_999,
    is_draft: bool = False,
) -> Inputs:
    """Logits as a model in `dtype` gives them: rounded to it, hence with equal ones, and handed over in float32.

    Of a draft, the columns are every third token.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {
        "logits": torch.randn(num_rows, vocab_size, device=device, generator=generator).to(dtype).float(),
        "vocabulary": torch.arange(0, 3 * vocab_size, 3, device=device) if is_draft else None,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Logits in, ids and whether they are finite out; of a vocabulary the ids that are chosen."""
    num_rows = len(inputs["logits"])
    return inputs["logits"].nbytes + (9 if inputs["vocabulary"] is None else 17) * num_rows


def flops(inputs: Inputs) -> int:
    """A comparison per logit."""
    return inputs["logits"].numel()


OP = KernelOp(
    name="greedy_tokens",
    reference=greedy_tokens,
    make_inputs=make_inputs,
    # Ids are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
