"""Both attention kernels over a quantized cache, which they read as it is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.decode_cut import Cut
from kernels.ops.paged_attention import paged_attention
from kernels.ops.paged_decode_attention import paged_decode_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.reference.paged_decode_attention import paged_decode_attention as decode_reference
from kernels.registry import REGISTRY
from kernels.specs import paged_attention as spec
from kernels.specs import paged_decode_attention as decode_spec
from tests.kernels.kv_oracle import FORMATS
from tests.kernels.oracle import naive_attention

CPU = torch.device("cpu")
# Decodes, chunks and a whole prompt of odd lengths; a request without rows.
CHUNKS: dict[str, Any] = {"query_lens": (1, 7, 0, 1, 19), "seq_lens": (33, 7, 0, 1, 40)}
SHAPES = [(9, 3, 64, None), (9, 3, 128, 13), (32, 8, 128, None)]
ON_GPU = [
    pytest.param(torch.bfloat16, 32, 8, 128, None, marks=pytest.mark.gpu),
    pytest.param(torch.bfloat16, 9, 3, 64, 13, marks=pytest.mark.gpu),
]
EVERY = [
    *((dtype, *shape) for dtype, shape in zip((torch.float32, torch.float16, torch.float32), SHAPES, strict=True)),
    *ON_GPU,
]


def assert_near(output: Tensor, expected: Tensor, op: str) -> None:
    tolerance = REGISTRY[op].tolerances[output.dtype]
    torch.testing.assert_close(output, expected.to(output), atol=tolerance.atol, rtol=tolerance.rtol)


def poison_foreign_slots(inputs: dict[str, Any]) -> None:
    """NaN for the scales of every slot that is no request's own, and codes that are large."""
    own = torch.zeros(inputs["key_cache"].shape[:2], dtype=torch.bool)
    for r, seq_len in enumerate(inputs["seq_lens"].tolist()):
        position = torch.arange(seq_len)
        own[inputs["block_table"][r].long().cpu()[position // 16], position % 16] = True
    foreign = ~own.to(inputs["query"].device)
    assert foreign.sum() > 16
    for name in ("key", "value"):
        inputs[f"{name}_scales"][foreign] = torch.nan
        inputs[f"{name}_cache"].view(torch.uint8)[foreign] = 120


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("window", [None, 9])
def test_references_follow_the_definition(kv_format: str, window: int | None) -> None:
    inputs = spec.make_inputs(torch.float32, CPU, **CHUNKS, head_dim=16, window=window, kv_dtype=kv_format)
    poison_foreign_slots(inputs)
    assert_near(reference(**inputs), naive_attention(**inputs), "paged_attention")
    inputs = decode_spec.make_inputs(
        torch.float32, CPU, seq_lens=(33, 1, 16, 50), head_dim=16, window=window, kv_dtype=kv_format
    )
    poison_foreign_slots(inputs)
    expected = naive_attention(**inputs, query_start_loc=torch.arange(5))
    assert_near(decode_reference(**inputs), expected, "paged_decode_attention")


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_dim", "window"), EVERY)
def test_kernel_agrees_with_the_reference(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    kv_format: str,
    device: torch.device,
) -> None:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "window": window}
    chunks = CHUNKS if num_heads == 9 else {"query_lens": (1, 5), "seq_lens": (35, 21)}
    inputs = spec.make_inputs(dtype, device, **chunks, **sizes, kv_dtype=kv_format)
    poison_foreign_slots(inputs)
    assert_near(paged_attention(**inputs), reference(**inputs), "paged_attention")

    seq_lens = (33, 0, 1, 150) if num_heads == 9 else (33, 0)
    inputs = decode_spec.make_inputs(dtype, device, seq_lens=seq_lens, **sizes, kv_dtype=kv_format)
    poison_foreign_slots(inputs)
    expected = decode_reference(**inputs)
    for cut in (None, Cut(4, 16, 16, 4)):
        assert_near(paged_decode_attention(**inputs, cut=cut), expected, "paged_decode_attention")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_heads_narrower_than_a_tile(kv_format: str, device: torch.device) -> None:
    """What pads a head of 8 to the 16 that a matrix unit takes has no part in it."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "kv_dtype": kv_format}
    inputs = spec.make_inputs(torch.float32, device, **CHUNKS, **sizes)
    assert_near(paged_attention(**inputs), naive_attention(**inputs), "paged_attention")
    inputs = decode_spec.make_inputs(torch.float32, device, seq_lens=(5, 18), **sizes)
    expected = naive_attention(**inputs, query_start_loc=torch.arange(3))
    assert_near(paged_decode_attention(**inputs), expected, "paged_decode_attention")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_damaged_token_is_seen_in_its_request_alone(kv_format: str, device: torch.device) -> None:
    inputs = spec.make_inputs(
        torch.float32,
        device,
        query_lens=(20, 9),
        seq_lens=(20, 9),
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        kv_dtype=kv_format,
    )
    before = paged_attention(**inputs)
    block = int(inputs["block_table"][0, 0])
    inputs["key_scales"][block, 12] = torch.nan  # position 12 of the first request
    for attend in (paged_attention, reference):
        after = attend(**inputs)
        assert after[12:20].isnan().all()
        torch.testing.assert_close(after[20:], before[20:], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kv_format", FORMATS)
def test_offsets_beyond_2_31(kv_format: str, device: torch.device) -> None:
    """A request at the end of a pool of more than 2^31 elements."""
    inputs = decode_spec.make_inputs(
        torch.float16, device, seq_lens=(40,), num_heads=32, num_kv_heads=8, head_dim=128, kv_dtype=kv_format
    )
    expected = paged_decode_attention(**inputs)
    small = {name: inputs[name] for name in ("key_cache", "value_cache", "key_scales", "value_scales")}
    used = len(small["key_cache"])
    num_blocks = 2**31 // (16 * 8 * 128) + 2 * used
    for name, tensor in small.items():
        large = torch.zeros(num_blocks, *tensor.shape[1:], dtype=tensor.dtype, device=device)
        large[-used:].view(torch.uint8).copy_(tensor.view(torch.uint8))
        inputs[name] = large
    inputs["block_table"] += num_blocks - used
    torch.testing.assert_close(paged_decode_attention(**inputs), expected, atol=0, rtol=0)
    chunk = {**inputs, "query_start_loc": torch.tensor([0, 1], dtype=torch.int32, device=device)}
    assert_near(paged_attention(**chunk), expected, "paged_attention")
