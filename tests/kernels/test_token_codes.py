"""Products over tokens that another kernel has quantized already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.fp8_linear import fp8_linear
from kernels.ops.int8_linear import int8_linear
from kernels.reference.quantize_tokens import quantize_tokens
from kernels.reference.token_codes import TokenCodes
from kernels.registry import REGISTRY

PRODUCTS = [pytest.param(fp8_linear, torch.float8_e4m3fn, id="fp8"), pytest.param(int8_linear, torch.int8, id="int8")]


@pytest.mark.parametrize(("launch", "to"), PRODUCTS)
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_they_give_what_the_tokens_themselves_give(
    launch: Any, to: torch.dtype, num_tokens: int, device: torch.device
) -> None:
    op = REGISTRY[launch.__name__]
    inputs = op.make_inputs(torch.float16, device, num_tokens=num_tokens, bias=True, residual=True)
    rounded: dict[str, Any] = inputs | {"x": TokenCodes(*quantize_tokens(inputs["x"], to), torch.float16)}
    for call in (launch, op.reference):
        expected = call(**inputs)
        assert isinstance(expected, Tensor)
        y: Any = call(**rounded)
        assert y.dtype == torch.float16
        assert torch.equal(y, expected)


@pytest.mark.parametrize(("launch", "to"), PRODUCTS)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"codes": lambda to: torch.zeros(2, 16)}, "x.codes is float32"),
        ({"scales": torch.zeros(2)}, r"x.scales has shape \[2\]; expected \[2, 1\]"),
        ({"scales": torch.zeros(2, 2)[:, :1]}, "x.codes or x.scales have gaps"),
        ({"codes": lambda to: torch.zeros(2, 20).to(to)}, r"codes has shape \[3, 16\]; expected \[any, 20\]"),
        ({"dtype": torch.int32}, "x.dtype is torch.int32; allowed are"),
    ],
)
def test_ones_that_do_not_fit(launch: Any, to: torch.dtype, changes: dict[str, Any], named: str) -> None:
    changes = {name: value(to) if callable(value) else value for name, value in changes.items()}
    x = TokenCodes(torch.zeros(2, 16).to(to), torch.zeros(2, 1), torch.float32)
    with pytest.raises(ValueError, match=named):
        launch(x._replace(**changes), torch.zeros(3, 16).to(to), torch.zeros(3, 1))
