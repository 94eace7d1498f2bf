"""The Triton kernel over weights as AutoAWQ and AutoGPTQ store them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from backend.models.json_fields import JsonFields
from backend.quantization.base import PackedWeight
from backend.quantization.formats import awq_gemm, gptq_v1
from backend.quantization.formats.quantization_config import read_quantization
from backend.quantization.int_weight import IntWeight, KernelIntWeight
from backend.quantization.permuted_weight import PermutedWeight

FIXTURES = Path(__file__).parent.parent / "quantization" / "fixtures"
DOWN = "model.layers.0.mlp.down_proj"


def stored_weight(name: str) -> tuple[PackedWeight, torch.Tensor]:
    """The projection of 96 inputs, and as the tool itself dequantizes it."""
    folder = FIXTURES / name
    stored = read_quantization(JsonFields(folder / "config.json", json.loads((folder / "config.json").read_text())))
    scheme = stored.scheme_of(DOWN) if stored else None
    assert scheme is not None
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    decode = awq_gemm.decode if scheme.format == "awq-gemm" else gptq_v1.decode
    expected = load_file(FIXTURES / f"{name}_expected.safetensors")[f"{DOWN}.weight"]
    return decode(DOWN, lambda tensor, *_: tensors[tensor], scheme, (64, 96)), expected


def for_kernel(weight: PackedWeight) -> PackedWeight:
    """As `prepare` lays it out on a GPU."""
    if isinstance(weight, PermutedWeight):
        return replace(weight, weight=for_kernel(weight.weight))
    assert isinstance(weight, IntWeight)
    return KernelIntWeight.of(weight)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("name", ["awq_tiny", "gptq_tiny", "gptq_8bit_tiny"])
def test_the_product_is_that_of_the_tools_weight(name: str, num_tokens: int, device: torch.device) -> None:
    weight, expected = stored_weight(name)
    assert isinstance(weight, PermutedWeight) == (name == "gptq_tiny")
    on_device = weight.to(str(device))
    prepared = on_device.prepare() if device.type == "cuda" else for_kernel(on_device)
    inner = prepared.weight if isinstance(prepared, PermutedWeight) else prepared
    assert isinstance(inner, KernelIntWeight)
    assert not prepared.emulated
    x = torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(0))
    y = prepared.linear(x.to(device)).cpu().double()
    # The tool's weights come in float16, 2^-11 off at most.
    torch.testing.assert_close(y, x.double() @ expected.double().t(), atol=1e-2, rtol=0)
    torch.testing.assert_close(y, x.double() @ weight.dequantize().double().t(), atol=1e-4, rtol=0)
