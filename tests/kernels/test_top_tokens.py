from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernels.ops.top_tokens as module
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["top_tokens"]
IMPLEMENTATIONS = ["reference", "launch"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width"), [(1, 1, 1), (3, 16, 5), (4, 33, 8), (2, 129, 3), (5, 20, 20), (2, 70, 32)]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_by_falling_logit_and_rising_id(
    num_rows: int, vocab_size: int, width: int, mapped: bool, which: str, device: torch.device
) -> None:
    """Rounded, so that many are equal; some are infinite, and some are no numbers."""
    torch.manual_seed(width)
    bands = GuardBands(value=77)
    logits = torch.randn(num_rows, vocab_size, device=device).round()
    damaged = torch.rand_like(logits)
    logits[damaged < 0.1], logits[damaged > 0.9], logits[damaged > 0.95] = math.nan, -math.inf, math.inf
    logits, vocabulary = bands.wrap(logits), 3 * torch.arange(vocab_size, device=device) + 1
    before = logits.clone()
    found = getattr(OP, which)(logits, width, vocabulary if mapped else None)
    for row, scores in zip(found.tolist(), before.tolist(), strict=True):
        keys = [-math.inf if math.isnan(score) else score for score in scores]
        columns = sorted(range(vocab_size), key=lambda at: -keys[at])[:width]
        assert row == ([3 * at + 1 for at in columns] if mapped else columns)
    assert found.dtype == torch.int64
    bands.assert_untouched()
    assert torch.equal(before.nan_to_num(nan=5), logits.nan_to_num(nan=5))


def test_takes_views_of_wider_tensors_and_writes_nothing_but_its_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 64, device=device)
    wide[:, 41:] = math.inf
    expected = wide[:, :41].topk(4).indices
    bands = GuardBands(value=1)
    monkeypatch.setattr(torch, "empty", bands.empty)
    found: Any = OP.launch(wide[:, :41], 4)
    monkeypatch.undo()
    bands.assert_untouched()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    assert getattr(OP, which)(torch.zeros(0, 8, device=device), 3).shape == (0, 3)


@pytest.mark.gpu
def test_on_real_vocabularies(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2048)
    for num_rows, vocab_size, width in ((1, 16_384, 5), (112, 32_000, 4), (16, 151_936, 8)):
        inputs = OP.make_inputs(torch.bfloat16, device, num_rows=num_rows, vocab_size=vocab_size, width=width)
        expected: Any = OP.reference(**inputs)
        found: Any = OP.launch(**inputs)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 8).half()}, "logits is float16; expected float32"),
        ({"logits": torch.zeros(8, 2).t()}, "logits has stride 2"),
        ({"width": 0}, "width is 0; 1 to 8 is expected of 8 columns"),
        ({"width": 9}, "width is 9; 1 to 8 is expected of 8 columns"),
        ({"logits": torch.zeros(2, 50), "width": 33}, "width is 33; 1 to 32 is expected of 50 columns"),
        ({"vocabulary": torch.zeros(7).long()}, r"vocabulary has shape \[7\]; expected \[8\]"),
        ({"vocabulary": torch.zeros(8).int()}, "vocabulary is int32; expected int64"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    check: Callable[..., Any] = OP.launch
    with pytest.raises(ValueError, match=message):
        check(**({"logits": torch.zeros(2, 8), "width": 3} | change))
