from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from kernels.reference.silu_and_mul import silu_and_mul as reference
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

SHAPES = [(5, 246), (1, 3072), (0, 64), (3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_the_gated_activation_of_transformers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).mul(4).to(dtype)
    before = x.clone()
    gate, up = x[:, : shape[1] // 2], x[:, shape[1] // 2 :]
    output = reference(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, ACT2FN["silu"](gate) * up)
    assert torch.equal(x, before)


# Few tokens and many are cut differently; 4,100 columns take more than one block either way.
@pytest.mark.parametrize("shape", [*SHAPES, (2, 8200), (17, 4100), (40, 6)])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernel_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    torch.manual_seed(0)
    bands = GuardBands()
    x = bands.wrap(torch.randn(shape, device=device).mul(4).to(dtype))
    before = x.clone()
    output = REGISTRY["silu_and_mul"].launch(x)
    tolerance = REGISTRY["silu_and_mul"].tolerances[dtype]
    torch.testing.assert_close(output, reference(x), atol=tolerance.atol, rtol=tolerance.rtol)
    assert torch.equal(x, before)
    bands.assert_untouched()


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16])
def test_kernel_rounds_where_the_reference_does(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256, device=device).to(dtype)
    gate, up = x.float().chunk(2, dim=-1)
    rounded_once = (torch.nn.functional.silu(gate) * up).to(dtype)
    expected = reference(x)
    assert (rounded_once != expected).float().mean() > 0.01  # so that the next line can tell the two apart
    assert (REGISTRY["silu_and_mul"].launch(x) != expected).float().mean() < 1e-3


def test_kernel_of_large_gates_is_finite(device: torch.device) -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=device)
    torch.testing.assert_close(
        REGISTRY["silu_and_mul"].launch(x), torch.tensor([[0.0, 0.0, 200.0, 2e4]], device=device)
    )


def test_kernel_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 246, device=device)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    output = REGISTRY["silu_and_mul"].launch(x)
    monkeypatch.undo()
    bands.assert_untouched()
    torch.testing.assert_close(output, reference(x))


def test_kernel_takes_rows_of_a_wider_tensor(device: torch.device) -> None:
    x = torch.randn(5, 300, device=device)[:, 20:266]
    assert x.stride() == (300, 1)
    torch.testing.assert_close(REGISTRY["silu_and_mul"].launch(x), reference(x))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 64, dtype=torch.int32), "x is int32; allowed are float32, bfloat16, float16"),
        (torch.zeros(2, 3, 64), r"x has shape \[2, 3, 64\]; expected \[any, any\]"),
        (torch.zeros(64, 64).t(), "x has stride 64 in its last dimension; expected 1"),
        (torch.zeros(2, 63), "x has 63 columns; expected an even number"),
    ],
)
def test_launcher_names_what_is_wrong(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REGISTRY["silu_and_mul"].launch(x)


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    intermediate = 14_336
    num_tokens = 2**31 // (2 * intermediate) + 2
    x = torch.zeros(num_tokens, 2 * intermediate, dtype=torch.float16, device="cuda")
    x[-1] = torch.randn(2 * intermediate, device="cuda")
    output = REGISTRY["silu_and_mul"].launch(x)
    torch.testing.assert_close(output[-1:], reference(x[-1:]))
    assert not output[:2].any()
