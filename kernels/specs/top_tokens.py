"""The likeliest few tokens of each row."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.top_tokens import top_tokens

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 16384, 5": {"num_rows": 1, "vocab_size": 16_384, "width": 5},
    "56 x 32000, 4": {"num_rows": 56, "vocab_size": 32_000, "width": 4},
    "32 x 32000, 8": {"num_rows": 32, "vocab_size": 32_000, "width": 8},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 5,
    vocab_size: int = 4_999,
    width: int = 5,
) -> Inputs:
    """Logits as a model in `dtype` gives them: rounded to it, hence with equal ones. Every third id can be drafted."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, device=device, generator=generator).to(dtype).float()
    return {"logits": logits, "width": width, "vocabulary": 3 * torch.arange(vocab_size, device=device)}


def bytes_moved(inputs: Inputs) -> int:
    """Logits in, ids out; of the vocabulary those entries."""
    num_rows = len(inputs["logits"])
    return inputs["logits"].nbytes + 2 * 8 * num_rows * inputs["width"]


def flops(inputs: Inputs) -> int:
    """A comparison per logit, as one that looks at each once."""
    return inputs["logits"].numel()


OP = KernelOp(
    name="top_tokens",
    reference=top_tokens,
    make_inputs=make_inputs,
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
