"""What a head learns: the target's distributions over the draft vocabulary.

With target probabilities p over the full vocabulary, kept where the draft vocabulary has the token, and the draft's q, the loss
of a place is `-sum_v p_v log q_v`. As the draft's logits are products `h . w_v` with rows of the target's output head that stay
as they are, this is `m logsumexp_v(h . w_v) - h . e` with the mass `m = sum_v p_v` and the expected row `e = sum_v p_v w_v`, and
its gradient by h is `m sum_v q_v w_v - e`. So a place's distribution is kept as one number and one row, and no logits are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend.spec_decode.heads.target import DenseTarget

_ROWS_AT_ONCE = 4096


class DraftTargets(NamedTuple):
    """The target's distributions at some places, over the draft vocabulary."""

    mass: Tensor  # float32 [num_places]
    expected_row: Tensor  # of the target's dtype [num_places, hidden]


@torch.no_grad()
def draft_targets(target: DenseTarget, hidden: Tensor, draft_rows: Tensor) -> DraftTargets:
    """Args:
    hidden: float [num_places, hidden], the target's after its final norm.
    draft_rows: [draft_vocab, hidden], the rows of its output head that the draft vocabulary has.
    """
    masses, expected = [], []
    for rows in hidden.split(_ROWS_AT_ONCE):
        normalizer = target.model.head(rows).float().logsumexp(dim=-1, keepdim=True)
        probs = (rows @ draft_rows.t()).float().sub_(normalizer).exp_()
        masses.append(probs.sum(dim=-1))
        expected.append(probs.to(draft_rows.dtype) @ draft_rows)
    return DraftTargets(torch.cat(masses), torch.cat(expected))


def soft_cross_entropy(hidden: Tensor, draft_rows: Tensor, targets: DraftTargets) -> Tensor:
    """The mean loss of all places, float32 scalar, differentiable by `hidden`, float [num_places, hidden]."""
    loss: Any = _SoftCrossEntropy.apply(hidden, draft_rows, *targets)
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """Its gradient is computed with it, a part of the rows at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, draft_rows: Tensor, mass: Tensor, expected_row: Tensor) -> Tensor:
        loss = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        with torch.autocast(hidden.device.type, enabled=False):  # it would write probabilities in float32
            for start in range(0, len(hidden), _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                rows, expected, of_mass = hidden[part].to(draft_rows.dtype), expected_row[part], mass[part, None]
                logits = rows @ draft_rows.t()
                normalizer = logits.float().logsumexp(dim=-1, keepdim=True)
                dot = (rows.float() * expected.float()).sum(dim=-1, keepdim=True)
                loss += (of_mass * normalizer - dot).sum()
                mean_row = logits.softmax(dim=-1) @ draft_rows
                gradient[part] = (of_mass * mean_row.float() - expected.float()) / len(hidden)
        ctx.save_for_backward(gradient)
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None, None
