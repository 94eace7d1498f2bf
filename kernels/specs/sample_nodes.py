"""What sampled rows draw behind each node of their drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.sample_nodes import sample_nodes

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 6 x 49152, unfiltered": {"num_rows": 1, "num_nodes": 6, "vocab_size": 49_152, "top_k": -1, "top_p": 1.0},
    "1 x 6 x 49152, top-p 0.9": {"num_rows": 1, "num_nodes": 6, "vocab_size": 49_152, "top_k": -1, "top_p": 0.9},
    "16 x 6 x 49152, top-p 0.9": {"num_rows": 16, "num_nodes": 6, "vocab_size": 49_152, "top_k": -1, "top_p": 0.9},
    "16 x 6 x 49152, greedy": {"num_rows": 16, "num_nodes": 6, "vocab_size": 49_152, "temperature": 0.0},
    "8 x 6 x 128256, both": {"num_rows": 8, "num_nodes": 6, "vocab_size": 128_256, "top_k": 50, "top_p": 0.9},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 3,
    num_nodes: int = 6,
    vocab_size: int = 499,
    temperature: float = 0.8,
    top_k: int = 30,
    top_p: float = 0.9,
) -> Inputs:
    """Chains. Logits as a model in `dtype` gives them: rounded to it, hence with equal ones. Drafts are likely ones or any."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    logits = 2 * torch.randn(num_rows * num_nodes, vocab_size, device=device, generator=generator)
    logits = logits.to(dtype).float()
    likeliest = logits.max(dim=-1).indices.view(num_rows, num_nodes)[:, :-1]
    nodes = torch.arange(num_nodes, device=device)
    prompts = 1 + random(900, num_rows)
    return {
        "logits": logits,
        "draft_token_ids": likeliest.where(random(2, *likeliest.shape) > 0, random(vocab_size, *likeliest.shape)),
        "parents": nodes - 1,
        "depths": nodes,
        "temperature": torch.full((num_rows,), temperature, device=device),
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
        "top_p": torch.full((num_rows,), top_p, device=device),
        "seeds": random(2**62, num_rows) - random(2**62, num_rows),
        "num_prompt_tokens": prompts,
        "num_computed": prompts + random(400, num_rows),
    }


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once, of greedy rows no logits, and tokens and probabilities out; filters need several passes."""
    num_rows, num_drafted = inputs["draft_token_ids"].shape
    given = sum(it.nbytes for name, it in inputs.items() if name != "logits")
    out = num_rows * (8 * (num_drafted + 1) + 4 * num_drafted)
    share = float((inputs["temperature"] > 0).float().mean())
    return int(share * inputs["logits"].nbytes) + given + out


def flops(inputs: Inputs) -> int:
    """Per logit: subtract, scale, exponentiate, add."""
    return 4 * int((inputs["temperature"] > 0).sum()) * len(inputs["parents"]) * inputs["logits"].shape[1]


OP = KernelOp(
    name="sample_nodes",
    reference=sample_nodes,
    make_inputs=make_inputs,
    # Of the probabilities, which are 1 at most: sums of exponentials. Ids are equal, or wrong, or a draw or a nucleus ended
    # within the rounding of fp32 weights: not these inputs'.
    tolerances={dtype: Tolerance(5e-6, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
