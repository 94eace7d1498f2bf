from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.reference.rms_norm import rms_norm as reference
from tests.kernels.oracle import GuardBands


def llama_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    module = LlamaRMSNorm(x.shape[-1], eps).to(x.dtype)
    module.weight.data = weight
    return module(x).detach()


@pytest.mark.parametrize("shape", [(5, 123), (1, 576), (0, 64), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_is_the_norm_of_transformers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).mul(3).to(dtype), torch.randn(shape[1]).to(dtype)
    output = reference(x, weight, 1e-5)
    assert output.dtype == dtype
    torch.testing.assert_close(output, llama_rms_norm(x, weight, 1e-5))


def test_reference_rounds_where_transformers_does() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 576).bfloat16(), torch.randn(576).bfloat16()
    expected = llama_rms_norm(x, weight, 1e-5)
    other_order = torch.nn.functional.rms_norm(x, (576,), weight, 1e-5)
    assert (other_order != expected).float().mean() > 0.01  # so that the next line can tell the two apart
    assert (reference(x, weight, 1e-5) != expected).float().mean() < 1e-3


def test_reference_squares_in_fp32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300^2 is infinite in float16
    torch.testing.assert_close(reference(x, torch.ones(64).half(), 1e-5), torch.ones(1, 64).half())


@pytest.mark.parametrize("shape", [(4, 576), (1, 123), (3, 1), (2, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_kernel_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    from kernels.ops.rms_norm import rms_norm
    from kernels.registry import REGISTRY

    torch.manual_seed(0)
    bands = GuardBands()
    x = bands.wrap(torch.randn(shape, device=device).mul(3).to(dtype))
    weight = bands.wrap(torch.randn(shape[1], device=device).to(dtype))
    output = rms_norm(x, weight, 1e-5)
    tolerance = REGISTRY["rms_norm"].tolerances[dtype]
    torch.testing.assert_close(output, reference(x, weight, 1e-5), atol=tolerance.atol, rtol=tolerance.rtol)
    bands.assert_untouched()


def test_kernel_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.ops.rms_norm import rms_norm

    x, weight = torch.randn(3, 123, device=device), torch.randn(123, device=device)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    output = rms_norm(x, weight, 1e-5)
    monkeypatch.undo()
    bands.assert_untouched()
    torch.testing.assert_close(output, reference(x, weight, 1e-5))


def test_kernel_takes_rows_of_a_wider_tensor(device: torch.device) -> None:
    from kernels.ops.rms_norm import rms_norm

    x = torch.randn(5, 200, device=device)[:, 20:143]
    assert x.stride() == (200, 1)
    weight = torch.randn(123, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference(x, weight, 1e-5))


def test_kernel_of_no_tokens(device: torch.device) -> None:
    from kernels.ops.rms_norm import rms_norm

    output = rms_norm(torch.empty(0, 64, device=device), torch.ones(64, device=device), 1e-5)
    assert output.shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.int32)}, "x is int32; allowed are float32, bfloat16, float16"),
        ({"x": torch.zeros(2, 3, 64)}, r"x has shape \[2, 3, 64\]; expected \[any, any\]"),
        ({"x": torch.zeros(64, 64).t()}, "x has stride 64 in its last dimension; expected 1"),
        ({"weight": torch.ones(63)}, r"weight has shape \[63\]; expected \[64\]"),
        ({"weight": torch.ones(64).half()}, "weight is float16; expected float32"),
        ({"weight": torch.ones(64, device="meta")}, "weight is on meta; expected cpu"),
        ({"x": torch.zeros(1, 70000), "weight": torch.ones(70000)}, "x has 70000 columns; at most 65536"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    from kernels.ops.rms_norm import rms_norm

    with pytest.raises(ValueError, match=message):
        rms_norm(**({"x": torch.zeros(2, 64), "weight": torch.ones(64), "eps": 1e-5} | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    from kernels.ops.rms_norm import rms_norm

    hidden = 8192
    num_tokens = 2**31 // hidden + 2
    x = torch.zeros(num_tokens, hidden, dtype=torch.float16, device="cuda")
    x[-1] = torch.randn(hidden, device="cuda")
    weight = torch.ones(hidden, dtype=torch.float16, device="cuda")
    output = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(output[-1:], reference(x[-1:], weight, 1e-5))
    assert not output[:2].any()
