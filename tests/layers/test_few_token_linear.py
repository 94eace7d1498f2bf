"""A lone linear layer by the kernel for few tokens, and by the library's product where that is the faster one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.layers import few_token_linear as module  # noqa: E402
from backend.layers.linear import Linear  # noqa: E402
from backend.layers.ops import library_linear  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def num_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of the kernel."""
    calls: list[int] = []
    norm_linear = module.norm_linear

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(x))
        return norm_linear(x, *args, **kwargs)

    monkeypatch.setattr(module, "norm_linear", counted)
    return calls


@pytest.mark.parametrize("linear_op", [library_linear, module.few_token_linear])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("num_tokens", "bias"), [(1, True), (6, False), (33, True)])
def test_is_the_product_in_the_dtype_that_is_asked_for(
    linear_op: Callable[[Linear, Tensor, torch.dtype | None], Tensor],
    dtype: torch.dtype,
    tolerance: float,
    num_tokens: int,
    bias: bool,
    num_launches: list[int],
) -> None:
    torch.manual_seed(num_tokens)
    linear = Linear(74, 41, bias=bias, dtype=dtype, device=DEVICE)
    for parameter in linear.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 74**-0.5)
    x = torch.randn(num_tokens, 74).to(DEVICE, dtype)
    assert linear.weight is not None
    expected = x.double() @ linear.weight.double().t() + (linear.bias.double() if linear.bias is not None else 0)
    for out_dtype in (None, torch.float32):
        output = linear_op(linear, x, out_dtype)
        assert output.dtype == (out_dtype or dtype)
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    assert num_launches == ([num_tokens] * 2 if linear_op is not library_linear and num_tokens <= 32 else [])


def test_logits_are_not_rounded_on_the_way() -> None:
    torch.manual_seed(0)
    linear = Linear(64, 64, bias=False, dtype=torch.float16, device=DEVICE)
    assert linear.weight is not None
    linear.weight.data.copy_(torch.randn(64, 64))
    x = torch.randn(2, 64).to(DEVICE, torch.float16)
    logits = module.few_token_linear(linear, x, torch.float32)
    assert (logits != logits.half().float()).float().mean() > 0.9
