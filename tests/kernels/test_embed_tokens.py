from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import REGISTRY
from tests.kernels.linear_oracle import guarded, widened
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

OP = REGISTRY["embed_tokens"]
IMPLEMENTATIONS = ["reference", "launch"]


def call(which: str, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
    return getattr(OP, which)(**inputs)


def looked_up(inputs: dict[str, Any]) -> Tensor:
    """Token by token."""
    sampled = inputs["sampled_token_ids"].tolist()
    pairs = zip(inputs["token_ids"].tolist(), inputs["rows"].tolist(), strict=True)
    return inputs["embedding"][[token_id if token_id >= 0 else sampled[row] for token_id, row in pairs]]


def assert_right(outputs: tuple[Tensor, Any], inputs: dict[str, Any]) -> None:
    y, deferred = outputs
    expected = looked_up(inputs)
    assert torch.equal(y, expected)
    if inputs["next_norm_weight"] is None:
        assert deferred is None
        return
    assert torch.equal(deferred.scaled, expected * inputs["next_norm_weight"])
    assert (deferred.square_sums.dtype, deferred.square_sums.shape) == (torch.float32, (len(y), 1))
    torch.testing.assert_close(
        deferred.square_sums.double(), expected.double().square().sum(1, keepdim=True), atol=0, rtol=1e-5
    )


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("next_norm", [False, True])
@pytest.mark.parametrize("hidden", [1, 64, 123, 2050])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_takes_each_token_from_where_it_is(
    dtype: torch.dtype, hidden: int, next_norm: bool, which: str, device: torch.device
) -> None:
    inputs, bands = guarded(OP.make_inputs(dtype, device, hidden=hidden, next_norm=next_norm, num_tokens=9))
    assert {-1} < set(inputs["token_ids"].tolist())
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    assert_right(call(which, inputs), inputs)
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_tokens_may_share_a_row_which_only_those_without_an_id_read(which: str, device: torch.device) -> None:
    """A prompt's tokens are all of one request; its row may hold nothing yet."""
    inputs = OP.make_inputs(torch.float32, device)
    inputs["token_ids"] = torch.tensor([3, 0, 98, -1, -1, -7, 5], device=device)
    inputs["rows"] = torch.tensor([2, 2, 2, 0, 1, 1, 2], device=device)
    inputs["sampled_token_ids"] = torch.tensor([98, 0, 2**40], device=device)
    assert_right(call(which, inputs), inputs)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_an_embedding_of_wider_rows(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    assert_right(call(which, inputs | {"embedding": widened(inputs["embedding"])}), inputs)


def test_kernel_writes_nothing_but_its_outputs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    outputs = call("launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert_right(outputs, inputs)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_tokens(which: str, device: torch.device) -> None:
    y, deferred = call(which, OP.make_inputs(torch.float32, device, num_tokens=0))
    assert (y.shape, deferred.scaled.shape, deferred.square_sums.shape) == ((0, 123), (0, 123), (0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding": torch.zeros(9, 8).long()}, "embedding is int64; allowed are float32"),
        ({"embedding": torch.zeros(9)}, r"embedding has shape \[9\]; expected \[any, any\]"),
        ({"embedding": torch.zeros(8, 9).t()}, "embedding has stride 9 in its last dimension; expected 1"),
        ({"token_ids": torch.zeros(2).int()}, "token_ids is int32; expected int64"),
        ({"token_ids": torch.zeros(1, 2).long()}, r"token_ids has shape \[1, 2\]; expected \[2\]"),
        ({"rows": torch.zeros(3).long()}, r"rows has shape \[3\]; expected \[2\]"),
        ({"rows": torch.zeros(2, device="meta").long()}, "rows is on meta; expected cpu"),
        ({"sampled_token_ids": torch.zeros(4).int()}, "sampled_token_ids is int32; expected int64"),
        ({"next_norm_weight": torch.zeros(9)}, r"next_norm_weight has shape \[9\]; expected \[8\]"),
        ({"next_norm_weight": torch.zeros(8).half()}, "next_norm_weight is float16; expected float32"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "token_ids": torch.zeros(2).long(),
        "rows": torch.zeros(2).long(),
        "sampled_token_ids": torch.zeros(4).long(),
        "embedding": torch.zeros(9, 8),
    }
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_an_embedding_past_two_to_the_31_elements(device: torch.device) -> None:
    hidden = 4096
    vocab_size = 2**31 // hidden + 3
    embedding = torch.zeros(vocab_size, hidden, dtype=torch.float16, device=device)
    embedding[-2:] = torch.randn(2, hidden, device=device).half()
    inputs = {
        "token_ids": torch.tensor([vocab_size - 1, -1, 0], device=device),
        "rows": torch.tensor([0, 1, 0], device=device),
        "sampled_token_ids": torch.tensor([0, vocab_size - 2], device=device),
        "embedding": embedding,
        "next_norm_weight": None,
    }
    assert_right(call("launch", inputs), inputs)
