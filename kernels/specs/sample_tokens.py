"""One token per row by temperature, top-k and top-p."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.sample_tokens import sample_tokens

SHAPES: dict[str, dict[str, Any]] = {
    "64 x 128256, unfiltered": {"num_rows": 64, "vocab_size": 128_256, "top_k": -1, "top_p": 1.0},
    "64 x 128256, top-k 50": {"num_rows": 64, "vocab_size": 128_256, "top_k": 50, "top_p": 1.0},
    "64 x 128256, top-p 0.9": {"num_rows": 64, "vocab_size": 128_256, "top_k": -1, "top_p": 0.9},
    "64 x 128256, both": {"num_rows": 64, "vocab_size": 128_256, "top_k": 50, "top_p": 0.9},
    "1 x 151936, top-p 0.9": {"num_rows": 1, "vocab_size": 151_936, "top_k": -1, "top_p": 0.9},
    "256 x 128256, top-p 0.9": {"num_rows": 256, "vocab_size": 128_256, "top_k": -1, "top_p": 0.9},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 5,
    vocab_size: int = 999,
    top_k: int = 30,
    top_p: float = 0.9,
) -> Inputs:
    """Logits as a model in `dtype` gives them: rounded to it, hence with equal ones, and handed over in float32."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = 2 * torch.randn(num_rows, vocab_size, device=device, generator=generator)
    return {
        "logits": logits.to(dtype).float(),
        "temperature": torch.full((num_rows,), 0.8, device=device),
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
        "top_p": torch.full((num_rows,), top_p, device=device),
        "draws": torch.rand(num_rows, dtype=torch.float64, device=device, generator=generator),
    }


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once and the tokens out, though a filter needs several passes over its row."""
    rows = sum(inputs[name].nbytes for name in ("temperature", "top_k", "top_p", "draws"))
    return inputs["logits"].nbytes + rows + 9 * len(inputs["logits"])


def flops(inputs: Inputs) -> int:
    """Per logit: subtract, scale, exponentiate, add."""
    return 4 * inputs["logits"].numel()


OP = KernelOp(
    name="sample_tokens",
    reference=sample_tokens,
    make_inputs=make_inputs,
    # Ids are equal, or wrong, or a draw or a nucleus ended within the rounding of fp32 weights: not these inputs'.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
