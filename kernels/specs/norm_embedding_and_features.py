"""Tokens' embeddings and the features beside them, each normalised."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp
from kernels.reference.norm_embedding_and_features import norm_embedding_and_features
from kernels.specs import rms_norm

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 576": {"num_tokens": 1, "hidden": 576, "vocab_size": 49_152},
    "6 x 576": {"num_tokens": 6, "hidden": 576, "vocab_size": 49_152},
    "64 x 4096": {"num_tokens": 64, "hidden": 4096, "vocab_size": 128_256},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    hidden: int = 123,
    vocab_size: int = 99,
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    return {
        "token_ids": torch.randint(vocab_size, (num_tokens,), device=device, generator=generator),
        "embedding": random(vocab_size, hidden),
        "embedding_norm_weight": random(hidden),
        "features": random(num_tokens, hidden),
        "feature_norm_weight": random(hidden),
        "eps": 1e-5,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Ids, features, both weights and each different token's embedding in once; both halves out."""
    row_bytes, num_different = inputs["embedding"][0].nbytes, len(inputs["token_ids"].unique())
    return inputs["token_ids"].nbytes + 3 * inputs["features"].nbytes + (2 + num_different) * row_bytes


def flops(inputs: Inputs) -> int:
    """Those of two norms."""
    return 2 * 4 * inputs["features"].numel()


OP = KernelOp(
    name="norm_embedding_and_features",
    reference=norm_embedding_and_features,
    make_inputs=make_inputs,
    tolerances=rms_norm.OP.tolerances,
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
