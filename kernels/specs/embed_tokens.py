"""Embeddings of tokens that the host may not know yet."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.embed_tokens import embed_tokens

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096": {"num_tokens": 1, "hidden": 4096, "vocab_size": 128_256},
    "64 x 4096": {"num_tokens": 64, "hidden": 4096, "vocab_size": 128_256},
    "8192 x 4096, no norm": {"num_tokens": 8192, "hidden": 4096, "vocab_size": 128_256, "next_norm": False},
    "8 x 576": {"num_tokens": 8, "hidden": 576, "vocab_size": 49_152},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 7,
    hidden: int = 123,
    vocab_size: int = 99,
    next_norm: bool = True,
) -> Inputs:
    """About half of the tokens are their row's last sampled one; rows are in no order."""
    generator = torch.Generator(device).manual_seed(seed)
    token_ids, sampled_token_ids = torch.randint(vocab_size, (2, num_tokens), device=device, generator=generator)
    is_sampled = torch.randint(2, (num_tokens,), device=device, generator=generator) == 1
    norm_weight = torch.randn(hidden, dtype=dtype, device=device, generator=generator)
    return {
        "token_ids": token_ids.masked_fill(is_sampled, -1),
        "rows": torch.randperm(num_tokens, device=device, generator=generator),
        "sampled_token_ids": sampled_token_ids,
        "embedding": torch.randn(vocab_size, hidden, dtype=dtype, device=device, generator=generator),
        "next_norm_weight": norm_weight if next_norm else None,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Ids in, each different token's embedding in once, and every token's out; with a norm that scaled too."""
    token_ids, embedding = inputs["token_ids"], inputs["embedding"]
    sampled = inputs["sampled_token_ids"][inputs["rows"]]
    num_different = len(torch.where(token_ids >= 0, token_ids, sampled).unique())
    row_bytes, num_tokens = embedding[0].nbytes, len(token_ids)
    moved = token_ids.nbytes + 16 * int((token_ids < 0).sum()) + (num_different + num_tokens) * row_bytes
    if inputs["next_norm_weight"] is not None:
        moved += (1 + num_tokens) * row_bytes + 4 * num_tokens
    return moved


def flops(inputs: Inputs) -> int:
    """With a norm: square and add, times the weight."""
    return 0 if inputs["next_norm_weight"] is None else 3 * len(inputs["token_ids"]) * inputs["embedding"].shape[1]


OP = KernelOp(
    name="embed_tokens",
    reference=embed_tokens,
    make_inputs=make_inputs,
    # Bytes are copied and one product is rounded; the sums of squares, of the order of `hidden`, come in another order.
    tolerances={dtype: Tolerance(0.0, 1e-5) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
