from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

OP = REGISTRY["norm_embedding_and_features"]
IMPLEMENTATIONS = ["reference", "launch"]
TENSORS = ("embedding", "embedding_norm_weight", "features", "feature_norm_weight")


def call(which: str, inputs: dict[str, Any]) -> Tensor:
    return getattr(OP, which)(**inputs)


def by_transformers(inputs: dict[str, Any]) -> Tensor:
    """A row after the other, by Llama's own norm."""
    norms = []
    for name in ("embedding_norm_weight", "feature_norm_weight"):
        norm = LlamaRMSNorm(len(inputs[name]), inputs["eps"])
        norm.weight.data = inputs[name]
        norms.append(norm)
    rows = [
        torch.cat((norms[0](inputs["embedding"][token_id]), norms[1](features)))
        for token_id, features in zip(inputs["token_ids"].tolist(), inputs["features"], strict=True)
    ]
    return torch.stack(rows).detach()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 576), (5, 123), (3, 1), (2, 1025)])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_both_halves_are_the_norms_of_transformers(
    dtype: torch.dtype, num_tokens: int, hidden: int, which: str, device: torch.device
) -> None:
    bands = GuardBands()
    inputs = OP.make_inputs(dtype, device, num_tokens=num_tokens, hidden=hidden)
    inputs |= {name: bands.wrap(inputs[name]) for name in TENSORS}
    before = {name: inputs[name].clone() for name in TENSORS}
    output = call(which, inputs)
    assert (output.dtype, output.shape, output.is_contiguous()) == (dtype, (num_tokens, 2 * hidden), True)
    tolerance = OP.tolerances[dtype]
    torch.testing.assert_close(output, by_transformers(inputs), atol=tolerance.atol, rtol=tolerance.rtol)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())
    bands.assert_untouched()


def test_kernel_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    output = call("launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    torch.testing.assert_close(output, by_transformers(inputs))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_rows_of_wider_tensors(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    expected = by_transformers(inputs)
    wide = {name: torch.full((len(inputs[name]), 200), torch.nan, device=device) for name in TENSORS[::2]}
    for name, tensor in wide.items():
        tensor[:, 20:143] = inputs[name]
    torch.testing.assert_close(call(which, inputs | {name: it[:, 20:143] for name, it in wide.items()}), expected)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_tokens(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_tokens=0, hidden=64)
    assert call(which, inputs).shape == (0, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding": torch.zeros(9, 64).int()}, "embedding is int32; allowed are float32, bfloat16, float16"),
        ({"token_ids": torch.zeros(2).int()}, "token_ids is int32; expected int64"),
        ({"token_ids": torch.zeros(2, 1).long()}, r"token_ids has shape \[2, 1\]; expected \[2\]"),
        ({"embedding": torch.zeros(64, 64).t()}, "embedding has stride 64 in its last dimension; expected 1"),
        ({"features": torch.zeros(3, 64)}, r"features has shape \[3, 64\]; expected \[2, 64\]"),
        ({"features": torch.zeros(2, 64).half()}, "features is float16; expected float32"),
        ({"embedding_norm_weight": torch.ones(63)}, r"embedding_norm_weight has shape \[63\]; expected \[64\]"),
        ({"feature_norm_weight": torch.ones(64, device="meta")}, "feature_norm_weight is on meta; expected cpu"),
        (
            {name: torch.ones(70000) for name in TENSORS[1::2]}
            | {"embedding": torch.zeros(1, 70000), "features": torch.zeros(2, 70000)},
            "embedding has 70000 columns; at most 65536",
        ),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = OP.make_inputs(torch.float32, torch.device("cpu"), num_tokens=2, hidden=64)
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    hidden = 8192
    vocab_size = 2**31 // hidden + 2
    inputs = OP.make_inputs(torch.float16, torch.device("cuda"), num_tokens=2, hidden=hidden, vocab_size=1)
    inputs["embedding"] = torch.zeros(vocab_size, hidden, dtype=torch.float16, device="cuda")
    inputs["embedding"][-1] = torch.randn(hidden, device="cuda")
    inputs["token_ids"] = torch.tensor([vocab_size - 1, 0], device="cuda")
    output, tolerance = call("launch", inputs), OP.tolerances[torch.float16]
    torch.testing.assert_close(output, by_transformers(inputs), atol=tolerance.atol, rtol=tolerance.rtol)
