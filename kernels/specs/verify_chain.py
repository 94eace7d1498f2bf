"""What becomes of chains of drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.sample_nodes import NOT_SAMPLED, SampledNodes
from kernels.reference.verify_chain import verify_chain

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 6 x 49152": {"num_rows": 1, "k": 5, "vocab_size": 49_152},
    "8 x 6 x 128256": {"num_rows": 8, "k": 5, "vocab_size": 128_256},
    "32 x 9 x 151936": {"num_rows": 32, "k": 8, "vocab_size": 151_936},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 5,
    k: int = 4,
    vocab_size: int = 4_999,
) -> Inputs:
    """Logits as a model in `dtype` gives them: rounded to it, hence with equal ones. Of the drafts about one in five is wrong.
    Every other row is sampled."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    logits = torch.randn(num_rows * (k + 1), vocab_size, device=device, generator=generator).to(dtype).float()
    likeliest = logits.max(dim=-1).indices.view(num_rows, k + 1)
    drawn = likeliest.where(random(5, num_rows, k + 1) > 0, random(vocab_size, num_rows, k + 1))
    is_sampled = torch.arange(num_rows, device=device)[:, None] % 2 == 1
    return {
        "logits": logits,
        "draft_token_ids": likeliest[:, :k].where(random(5, num_rows, k) > 0, random(vocab_size, num_rows, k)),
        "num_draft_tokens": random(k + 1, num_rows),
        "sampled": SampledNodes(
            drawn.where(is_sampled, NOT_SAMPLED), torch.rand(num_rows, k, device=device, generator=generator)
        ),
    }


def bytes_moved(inputs: Inputs) -> int:
    """Logits, drafts, their numbers and what was sampled in; for each row the packed round out."""
    num_rows, k = inputs["draft_token_ids"].shape
    taken = sum(it.nbytes for it in (inputs["logits"], *inputs["sampled"]))
    return taken + 8 * num_rows * (k + 1) + num_rows * (28 * k + 24)


def flops(inputs: Inputs) -> int:
    """A comparison, an exponential of a difference and a sum per logit."""
    return 4 * inputs["logits"].numel()


def _comparable(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids as they are, and probabilities as numbers instead of bytes."""
    packed, ids = output
    return ids, packed[ids.nbytes :].view(torch.float32)


OP = KernelOp(
    name="verify_chain",
    reference=verify_chain,
    make_inputs=make_inputs,
    # Of the probabilities, which are 1 at most: sums of exponentials. Ids are equal or wrong.
    tolerances={dtype: Tolerance(5e-6, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    comparable=_comparable,
)
