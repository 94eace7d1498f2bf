from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from kernels.reference.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("shape", [(5, 246), (1, 3072), (0, 64), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_the_gated_activation_of_transformers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).mul(4).to(dtype)
    before = x.clone()
    gate, up = x[:, : shape[1] // 2], x[:, shape[1] // 2 :]
    output = silu_and_mul(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, ACT2FN["silu"](gate) * up)
    assert torch.equal(x, before)
