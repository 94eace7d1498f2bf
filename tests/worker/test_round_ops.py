"""`RoundOps`: the op that verifies greedy drafts, and a sampler in its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.sample.rejection_sampler import RejectionSampler
from backend.spec_decode.synthetic import SyntheticSampler
from backend.worker.round_ops import REFERENCE_ROUND_OPS, verify_with


def random_round(k: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(k)
    logits = torch.randn(20 * (k + 1), 30).mul(3).round()
    best = logits.max(-1).indices.view(20, k + 1)[:, :k]
    drafts = best.where(torch.rand(20, k) < 0.8, torch.randint(30, (20, k)))
    return logits, drafts, torch.randint(k + 1, (20,))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_op_leaves_what_the_sampler_does_to_the_bit(k: int) -> None:
    inputs = random_round(k)
    by_op, by_sampler = REFERENCE_ROUND_OPS.verify_chain(*inputs), verify_with(RejectionSampler())(*inputs)
    assert all(map(torch.equal, by_op, by_sampler))


def test_a_sampler_of_its_own_settles_as_it_accepts() -> None:
    """Even ids are accepted whatever the logits say, and the next step begins behind them."""
    logits = torch.zeros(8, 30)
    logits[:, 9] = 1.0
    drafts = torch.tensor([[4, 6, 5], [7, 2, 2]])
    packed, ids = verify_with(SyntheticSampler(0.5))(logits, drafts, torch.tensor([3, 3]))
    assert packed.shape == (2 * (8 * 9 + 12 * 3),)
    assert ids.tolist() == [[4, 6, 9, -1, 2, 1, 4, 6, 5], [9, -1, -1, -1, 0, 1, 7, 2, 2]]
    last_token_ids = torch.zeros(3, dtype=torch.int64)
    next_token_ids, last_indices = REFERENCE_ROUND_OPS.settle_round(
        ids, torch.tensor([2, 0]), torch.tensor([0, 4]), torch.arange(8), last_token_ids, torch.tensor([5, -1])
    )
    assert last_token_ids.tolist() == [9, 0, 9]
    assert next_token_ids.tolist() == [4, 6, 9, 0, 9, 0, 0, 0]
    assert last_indices.tolist() == [2, 4]
