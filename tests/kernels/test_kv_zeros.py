"""Known fault QZ-2 in the KV cache: zeros and next to nothing in keys and values are stored and read without a NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.paged_attention import paged_attention
from kernels.ops.paged_decode_attention import paged_decode_attention
from kernels.reference.kv_quantization import DTYPES, quantize
from kernels.reference.paged_attention import paged_attention as reference
from kernels.reference.paged_decode_attention import paged_decode_attention as decode_reference
from kernels.specs import paged_attention as spec
from kernels.specs.paged_decode_attention import OF_CHUNKS
from tests.kernels.kv_oracle import FORMATS, decoded

LENGTH, BLOCK, CHANNEL = 40, 16, 5
CPU = torch.device("cpu")
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
WHICH = ["reference", "kernel"]


def draw(seed: int) -> Tensor:
    """Keys or values of one request."""
    return torch.randn(LENGTH, 2, 16, generator=torch.Generator().manual_seed(seed))


def inputs_of(keys: Tensor, values: Tensor, kv_format: str | None, device: torch.device) -> dict[str, Any]:
    """Of a prompt run at once, whose keys and values [LENGTH, 2, 16] are stored in scattered blocks."""
    inputs = spec.make_inputs(
        torch.float32, device, query_lens=(LENGTH,), seq_lens=(LENGTH,), **SIZES, kv_dtype=kv_format
    )
    inputs["query"] = torch.randn(LENGTH, 4, 16, generator=torch.Generator().manual_seed(9)).to(device)
    for name, rows in (("key", keys), ("value", values)):
        data, scales = (rows, None) if kv_format is None else quantize(rows, DTYPES[kv_format])
        for position in range(LENGTH):
            place = int(inputs["block_table"][0, position // BLOCK]), position % BLOCK
            inputs[f"{name}_cache"][place] = data[position]
            if scales is not None:
                inputs[f"{name}_scales"][place] = scales[position]
    return inputs


def attend(inputs: dict[str, Any], which: str) -> Tensor:
    """All rows, the last one by the decode kernel, which has to agree with the other."""
    prefill, decode = (
        (reference, decode_reference) if which == "reference" else (paged_attention, paged_decode_attention)
    )
    output = prefill(**inputs)
    last = {name: value for name, value in inputs.items() if name not in OF_CHUNKS}
    last["query"] = inputs["query"][-1:]
    torch.testing.assert_close(decode(**last), output[-1:], atol=1e-4, rtol=1e-4)
    return output.cpu()


def plain(keys: Tensor, values: Tensor) -> Tensor:
    """Attention over keys and values as they are."""
    return reference(**inputs_of(keys, values, None, CPU))


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-9])
def test_keys_that_are_nothing_weigh_all_positions_alike(
    value: float, kv_format: str, which: str, device: torch.device
) -> None:
    """Products with them are 0, or as good as: what comes out is the mean of the values so far."""
    values = draw(0)
    inputs = inputs_of(torch.full((LENGTH, 2, 16), value), values, kv_format, device)
    read = decoded(*quantize(values, DTYPES[kv_format]))
    means = read.cumsum(0) / torch.arange(1, LENGTH + 1)[:, None, None]
    torch.testing.assert_close(attend(inputs, which).double(), means.repeat_interleave(2, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_block_of_zero_keys_among_others(kv_format: str, which: str, device: torch.device) -> None:
    """Beside attention over keys and values as they were: as near as these formats come without the block."""
    keys, values = draw(1), draw(2)
    apart = (attend(inputs_of(keys, values, kv_format, device), which) - plain(keys, values)).abs().max()
    keys[BLOCK : 2 * BLOCK] = 0.0
    inputs = inputs_of(keys, values, kv_format, device)
    stored = decoded(inputs["key_cache"], inputs["key_scales"])[int(inputs["block_table"][0, 1])]
    assert not stored.any(), "zeros are exact"
    output = attend(inputs, which)
    assert (output - plain(keys, values)).abs().max() < 1.5 * apart


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_values_that_are_always_zero(kv_format: str, which: str, device: torch.device) -> None:
    """Of a whole KV head they come out as 0. A channel beside others has no scale of its own: int4 has no code for 0 there,
    and errs by half a step as everywhere."""
    values = draw(3)
    values[:, 1] = 0.0
    values[:, 0, CHANNEL] = 0.0
    inputs = inputs_of(draw(4), values, kv_format, device)
    output = attend(inputs, which)
    assert output.isfinite().all()
    assert not output[:, 2:].any()
    step = (values[:, 0].amax(1) - values[:, 0].amin(1)).max() / 15 if kv_format == "int4" else 0.0
    assert (output[:, :2, CHANNEL].abs() <= step * 0.51).all()
    assert output[:, :2].abs().amax() > 0.1


@pytest.mark.parametrize("value", [1e-30, 1e-8, 0.7, -3.0])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_constants_come_back_within_a_step(value: float, kv_format: str) -> None:
    """Of float16 scales and minimums; what is below the least of those is 0."""
    read = decoded(*quantize(torch.full((1, 16), value), DTYPES[kv_format]))
    step = abs(value) * (2**-4 if kv_format == "fp8_e4m3" else 2**-7) + 2**-24 * 127
    assert ((read - value).abs() <= step).all()
    assert (read.abs() <= abs(value) * (1 + 2**-4)).all()
