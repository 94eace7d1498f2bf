"""The loss and its gradient against the formula it is named after, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.spec_decode.heads import objective
from backend.spec_decode.heads.objective import draft_targets, soft_cross_entropy
from backend.spec_decode.heads.target import output_rows
from tests.spec_decode.tiny_heads import make_target


@pytest.mark.parametrize("num_rows_at_once", [4096, 7])
def test_loss_and_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows_at_once: int) -> None:
    monkeypatch.setattr(objective, "_ROWS_AT_ONCE", num_rows_at_once)
    target = make_target(tmp_path)
    vocabulary = torch.arange(0, 512, 5)
    rows = output_rows(target.model, vocabulary)
    generator = torch.Generator().manual_seed(0)
    target_hidden = torch.randn(17, 72, generator=generator)
    hidden = torch.randn(17, 72, generator=generator).requires_grad_()
    targets = draft_targets(target, target_hidden, rows)
    loss = soft_cross_entropy(hidden, rows, targets)
    (gradient,) = torch.autograd.grad(3 * loss, hidden)

    probs = (target_hidden.double() @ output_rows(target.model, torch.arange(512)).double().t()).softmax(-1)
    kept = probs[:, vocabulary]
    exact = hidden.detach().double().requires_grad_()
    expected = -(kept * (exact @ rows.double().t()).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(targets.mass.double(), kept.sum(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(3 * expected, exact)[0], atol=1e-6, rtol=1e-4)
