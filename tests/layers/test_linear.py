"""The linear layer's packed CPU path against the plain product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backend.layers.linear import Linear

CPU = torch.device("cpu")


def _linear(in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> tuple[Linear, torch.Tensor]:
    """A random layer, and its weight in float64."""
    layer = Linear(in_features, out_features, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(out_features)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    assert layer.weight is not None
    return layer, layer.weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (72, 120), (33, 7), (1, 5)])
def test_prepared_equals_the_exact_product(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    layer, weight = _linear(in_features, out_features, bias=bias, dtype=dtype)
    layer.prepare()
    for num_rows in (0, 1, 2, 3, 4, 8, 17):
        x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        expected = x.double() @ weight.T
        if layer.bias is not None:
            expected += layer.bias.double()
        output = layer(x)
        assert output.shape == (num_rows, out_features)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, atol=tolerance * in_features**0.5, rtol=tolerance)


def test_preparing_keeps_no_second_copy() -> None:
    layer, weight = _linear(64, 96, bias=False, dtype=torch.float32)
    layer.prepare()
    assert layer.weight is None
    assert list(layer.parameters()) == []
    assert layer._cpu_weight is not None
    assert torch.equal(layer._cpu_weight.to_dense().double(), weight)


def test_a_shared_weight_stays_where_it_is() -> None:
    embedding = nn.Parameter(torch.randn(96, 64), requires_grad=False)
    layer = Linear(64, 96, bias=False, dtype=torch.float32, device=CPU, shared_weight=embedding)
    layer.prepare()
    assert layer.weight is embedding
    assert layer._cpu_weight is not None
    assert layer._cpu_weight.data_ptr() == embedding.data_ptr()
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ embedding.T, atol=1e-4, rtol=1e-4)


def test_without_onednn_the_plain_product_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layer, weight = _linear(64, 96, bias=False, dtype=torch.float32)
    layer.prepare()
    assert layer.weight is not None
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T, atol=1e-4, rtol=1e-4)
