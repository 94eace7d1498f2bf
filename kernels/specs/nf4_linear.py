"""A linear layer over weights in NormalFloat4 with double quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.int_words import CHUNK
from kernels.reference.nf4_linear import nf4_linear

_LARGE: dict[str, Any] = {"num_columns": 4096, "num_rows": 28672}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 28672": _LARGE | {"num_tokens": 1},
    "16 x 4096 to 28672": _LARGE | {"num_tokens": 16},
    "64 x 4096 to 28672": _LARGE | {"num_tokens": 64},
    "1 x 14336 to 4096": {"num_tokens": 1, "num_columns": 14336, "num_rows": 4096},
    "1 x 576 to 3072": {"num_tokens": 1, "num_columns": 576, "num_rows": 3072},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 192,
    num_rows: int = 77,
    block_size: int = 64,
    bias: bool = False,
    residual: bool = False,
) -> Inputs:
    """Words of random bits, magnitudes of which the largest is three times the smallest; products have a spread of about 1."""
    generator = torch.Generator(device).manual_seed(seed)
    num_blocks = num_columns // block_size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    words_shape = (num_rows, -(-num_columns // CHUNK) * 16)
    words = torch.randint(-(2**31), 2**31, words_shape, device=device, generator=generator)
    # A block's numbers of all rows side by side: the rows of a tile are loaded together.
    codes = torch.randint(-127, 128, (num_blocks, num_rows), device=device, generator=generator).to(torch.int8).t()
    means = (2 + torch.rand(num_rows, 1, device=device, generator=generator)).mul_(num_columns**-0.5).bfloat16()
    return {
        "x": random(num_tokens, num_columns),
        "words": words.to(torch.int32),
        "codes": codes,
        "steps": means / 254,
        "means": means,
        "bias": random(num_rows) if bias else None,
        "residual": random(num_tokens, num_rows) if residual else None,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once, and the output out."""
    moved = sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))
    return moved + len(inputs["x"]) * len(inputs["words"]) * inputs["x"].element_size()


def flops(inputs: Inputs) -> int:
    """Of the product alone."""
    return 2 * inputs["x"].numel() * len(inputs["words"])


OP = KernelOp(
    name="nf4_linear",
    reference=nf4_linear,
    make_inputs=make_inputs,
    # fp32 sums in another order; of 16 bits the reference rounds weights and the kernel levels, as far off either way.
    tolerances={
        torch.float32: Tolerance(2e-5, 1e-5),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float16: Tolerance(4e-3, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
