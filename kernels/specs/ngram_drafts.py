"""Drafts looked up in each request's own text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.ngram_drafts import ngram_drafts

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 5 in 8192": {"num_rows": 1, "k": 5, "max_len": 8192, "num_texts": 257},
    "32 x 5 in 8192": {"num_rows": 32, "k": 5, "max_len": 8192, "num_texts": 257},
    "32 x 8 in 131072": {"num_rows": 32, "k": 8, "max_len": 131_072, "num_texts": 33},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 6,
    k: int = 4,
    max_len: int = 40,
    num_texts: int = 8,
    alphabet: int = 4,
    n_min: int = 2,
    n_max: int = 3,
) -> Inputs:
    """Texts of few different tokens, in rows in no order, some near their end; about one in eight is granted nothing.

    `dtype` says nothing: there are no floats.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    num_accepted = random(k + 1, num_rows, 1)
    token_ids = random(alphabet, num_rows, k + 1).where(torch.arange(k + 1, device=device) <= num_accepted, -1)
    ids = torch.cat((token_ids, num_accepted, torch.ones_like(num_accepted), random(alphabet, num_rows, k)), dim=1)
    return {
        "ids": ids,
        "rows": torch.randperm(num_texts, device=device, generator=generator)[:num_rows],
        "num_granted": (random(k, num_rows) + 1) * (random(8, num_rows) > 0),
        "texts": random(alphabet, num_texts, max_len).int(),
        "lengths": (random(max_len, num_texts) + max_len // 2).clamp(max=max_len - 1),
        "drafts": random(alphabet, num_rows, k) - 9,
        "counts": random(k, num_rows) - 9,
        "n_min": n_min,
        "n_max": n_max,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Each text in once; what is known of its round in, and the new tokens, the length and the draft out."""
    is_granted = inputs["num_granted"] > 0
    num_read = int(inputs["lengths"][inputs["rows"]][is_granted].sum())
    num_rows, k = inputs["drafts"].shape
    num_new = int((inputs["ids"][:, k + 1][is_granted] + 1).sum())
    lengths = 8 * (num_rows + int(is_granted.sum()))
    return 4 * num_read + (8 + 4) * num_new + 8 * num_rows * (3 + k + 1) + lengths


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="ngram_drafts",
    reference=ngram_drafts,
    make_inputs=make_inputs,
    # Ids are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"texts", "lengths", "drafts", "counts"}),
)
