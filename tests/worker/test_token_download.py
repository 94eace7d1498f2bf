"""Sampled tokens on their way to the host."""

from __future__ import annotations

import pytest
import torch

from backend.worker.step_tensors import COPIES_PER_STEP, STEPS_UNDER_WAY, HostBuffers
from backend.worker.token_download import TokenDownload

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_tokens_and_those_that_have_none(device: torch.device) -> None:
    outcomes = torch.tensor([5, -1, 0, 2**40], device=device)
    output = TokenDownload(["a", "b", "c", "d"], outcomes, HostBuffers(device), "no usable logits").result()
    assert output.sampled_token_ids == {"a": [5], "c": [0], "d": [2**40]}
    assert output.errors == {"b": "no usable logits"}
    assert list(output.sampled_token_ids) == ["a", "c", "d"]  # in batch order


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_of_nothing(device: torch.device) -> None:
    outcomes = torch.empty(0, dtype=torch.int64, device=device)
    output = TokenDownload([], outcomes, HostBuffers(device), "").result()
    assert (output.sampled_token_ids, output.errors) == ({}, {})


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_steps_under_way_do_not_touch_one_another(device: torch.device) -> None:
    """As many as there are buffers, though what is downloaded is overwritten in between."""
    buffers, outcomes = HostBuffers(device), torch.zeros(3, dtype=torch.int64, device=device)
    pending = []
    for step in range(STEPS_UNDER_WAY * COPIES_PER_STEP):
        outcomes.copy_(torch.tensor([step, 10 + step, -1]))
        pending.append(TokenDownload(["a", "b", "c"], outcomes, buffers, "none"))
    for step, download in enumerate(pending):
        output = download.result()
        assert (output.sampled_token_ids, output.errors) == ({"a": [step], "b": [10 + step]}, {"c": "none"})
