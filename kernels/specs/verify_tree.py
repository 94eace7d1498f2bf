"""What becomes of trees of drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.sample_nodes import NOT_SAMPLED, SampledNodes
from kernels.reference.verify_tree import TreeRound, verify_tree

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 26 x 49152": {"num_rows": 1, "num_nodes": 26, "vocab_size": 49_152},
    "8 x 26 x 128256": {"num_rows": 8, "num_nodes": 26, "vocab_size": 128_256},
    "16 x 32 x 151936": {"num_rows": 16, "num_nodes": 32, "vocab_size": 151_936},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 5,
    num_nodes: int = 14,
    vocab_size: int = 4_999,
) -> Inputs:
    """Logits as a model in `dtype` gives them: rounded to it, hence with equal ones. Each node has three children while there
    are any, of which one in three holds the likeliest token. Every other row is sampled."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    logits = torch.randn(num_rows * num_nodes, vocab_size, device=device, generator=generator).to(dtype).float()
    nodes = torch.arange(num_nodes, device=device)
    parents = (nodes - 1) // 3
    best = logits.max(dim=-1).indices.view(num_rows, num_nodes)
    likeliest = best.index_select(1, parents[1:])
    drawn = best.where(random(5, num_rows, num_nodes) > 0, random(vocab_size, num_rows, num_nodes))
    is_sampled = torch.arange(num_rows, device=device)[:, None] % 2 == 1
    depth, node = 0, num_nodes - 1
    while node:
        depth, node = depth + 1, (node - 1) // 3
    return {
        "logits": logits,
        "draft_token_ids": likeliest.where(random(3, *likeliest.shape) == 0, random(vocab_size, *likeliest.shape)),
        "num_draft_tokens": random(num_nodes, num_rows),
        "parents": parents,
        "depth": depth,
        "sampled": SampledNodes(
            drawn.where(is_sampled, NOT_SAMPLED), torch.rand(likeliest.shape, device=device, generator=generator)
        ),
    }


def bytes_moved(inputs: Inputs) -> int:
    """Logits, the tree, drafts, their numbers and what was sampled in; for each row the packed round, its path and what follows
    each node out."""
    num_rows, num_drafted = inputs["draft_token_ids"].shape
    taken = sum(it.nbytes for it in (inputs["logits"], inputs["parents"], *inputs["sampled"]))
    taken += 8 * num_rows * (num_drafted + 1)
    return taken + num_rows * (28 * inputs["depth"] + 24 + 8 * (inputs["depth"] + 1 + num_drafted + 1))


def flops(inputs: Inputs) -> int:
    """A comparison, an exponential of a difference and a sum per logit."""
    return 4 * inputs["logits"].numel()


def _comparable(output: TreeRound) -> tuple[Tensor, ...]:
    """Ids as they are, and probabilities as numbers instead of bytes."""
    return (*output[1:], output.packed[output.ids.nbytes :].view(torch.float32))


OP = KernelOp(
    name="verify_tree",
    reference=verify_tree,
    make_inputs=make_inputs,
    # Of the probabilities, which are 1 at most: sums of exponentials. Ids are equal or wrong.
    tolerances={dtype: Tolerance(5e-6, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    comparable=_comparable,
)
