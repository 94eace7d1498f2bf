"""LLM.int8(): inputs with outliers apart, against the same by columns in float64."""

from __future__ import annotations

import math

import pytest
import torch

from backend.quantization.llm_int8 import LLMInt8, LLMInt8Weight
from backend.quantization.w8a8_int8 import W8A8Int8

OUTLIERS = [3, 40, 41, 95]


def make_weight(rows: int = 24, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05


def make_inputs(num_tokens: int = 7, columns: int = 96) -> torch.Tensor:
    """Below 6 but for four inputs, each large in some tokens only."""
    x = torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(1)).clamp(-5.9, 5.9)
    for token, column in enumerate(OUTLIERS):
        x[token, column] = 60.0 * (-1) ** token
    return x


def by_columns(x: torch.Tensor, packed: LLMInt8Weight, outliers: list[int]) -> torch.Tensor:
    """The paper's decomposition, equation 8, in float64; weights of outliers are the stored ones in x's dtype.

    Codes are chosen in float32, where a token's largest regular value may lie in the middle of two.
    """
    weight = packed.dequantize().to(x.dtype).double()
    regular = [column for column in range(x.shape[1]) if column not in outliers]
    part = x[:, regular].float()
    scales = part.abs().amax(1, keepdim=True) / 127.5
    rounded = (part / scales).round().clamp(-128, 127).double() * scales.double()
    return x[:, outliers].double() @ weight[:, outliers].t() + rounded @ packed.dequantize().double()[:, regular].t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_both_parts(dtype: torch.dtype) -> None:
    packed = LLMInt8(6.0).quantize(make_weight())
    x = make_inputs().to(dtype)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = by_columns(x, packed, OUTLIERS) + bias.double()
    y = packed.linear(x, bias)
    assert y.dtype == dtype
    # In 16 bits each of the two parts is rounded.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=max(1e-5, tolerance))


def test_a_value_of_the_threshold_is_an_outlier_in_every_token() -> None:
    packed = LLMInt8(6.0).quantize(make_weight())
    x = make_inputs()
    x[:, OUTLIERS] = 0.5
    below = math.nextafter(6.0, 0.0) - 1e-6
    for value, outliers in ((6.0, [10]), (-6.0, [10]), (below, [])):
        x[2, 10] = value
        torch.testing.assert_close(packed.linear(x).double(), by_columns(x, packed, outliers), rtol=0, atol=1e-5)
        other = [] if outliers else [10]
        assert not torch.allclose(packed.linear(x).double(), by_columns(x, packed, other), rtol=0, atol=1e-4)


def test_without_outliers_it_is_w8a8() -> None:
    x, weight = make_inputs(), make_weight()
    expected = W8A8Int8().quantize(weight)
    assert torch.equal(LLMInt8(100.0).quantize(weight).linear(x), expected.linear(x))
    packed = LLMInt8(6.0).quantize(weight)
    assert torch.equal(packed.dequantize(), expected.dequantize())
    assert packed.nbytes == expected.nbytes
    assert not torch.allclose(packed.linear(x), expected.linear(x), atol=1e-3)


def test_activations_of_outliers_are_exact() -> None:
    """So that only weights are rounded where all inputs have one, and an outlier costs its token's other inputs nothing."""
    weight, x = make_weight(), make_inputs()
    packed = LLMInt8(1e-9).quantize(weight)
    torch.testing.assert_close(packed.linear(x), x @ packed.dequantize().t(), rtol=1e-5, atol=1e-5)
    exact = x.double() @ packed.dequantize().double().t()
    errors = [
        float((method.quantize(weight).linear(x).double() - exact).norm()) for method in (LLMInt8(6.0), W8A8Int8())
    ]
    # In four of the seven tokens a step of activations is 60/127.5 instead of about 3/127.5: 15 times by root mean square.
    assert errors[0] < errors[1] / 10


def test_zeros_give_zeros() -> None:
    weight = make_weight()
    weight[5] = 0
    packed = LLMInt8(6.0).quantize(weight)
    x = make_inputs()
    x[6] = 0
    y = packed.linear(x)
    assert torch.equal(y[6], torch.zeros(24))
    assert torch.equal(y[:, 5], torch.zeros(7))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_stays_visible_and_harms_no_other(bad: float) -> None:
    packed = LLMInt8(6.0).quantize(make_weight())
    x = make_inputs()
    expected = packed.linear(x)
    x[1, OUTLIERS[0]] = bad
    y = packed.linear(x)
    keep = [0, 2, 3, 4, 5, 6]
    assert torch.equal(y[keep], expected[keep])
    assert not y[1].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_can_be_captured_in_a_graph(dtype: torch.dtype) -> None:
    """Which inputs are outliers is decided without the host."""
    packed = LLMInt8(6.0).quantize(make_weight().cuda())
    x = make_inputs().to("cuda", dtype)
    expected = packed.linear(x)
    still = torch.zeros_like(x)
    packed.linear(still)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed.linear(still)
    still.copy_(x)
    graph.replay()
    torch.testing.assert_close(y, expected)
