"""Quantized vectors: their definition, rows that are out of the ordinary, and the kernels that store them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference.kv_quantization import DTYPES, dequantize, quantize, rotate
from kernels.reference.rotary_and_store import rotary_and_store as reference_rotary_and_store
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.store_kv_cache import store_kv_cache as reference_store_kv_cache
from kernels.registry import REGISTRY
from kernels.specs import rotary_and_store, store_kv_cache
from tests.kernels.kv_oracle import E4M3, FORMATS, decoded, fp16, nearest_e4m3, stored
from tests.kernels.oracle import KERNEL_DTYPES

CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")

# Of 32: what is usual, and what is not.
WAVE = [math.sin(1 + 7 * i) * (1 + i % 5) for i in range(32)]
ROWS = {
    "usual": WAVE,
    "zeros": [0.0] * 32,
    "constant": [3.1415927] * 32,
    "negative constant": [-0.7] * 32,
    "positive": [5 + x / 10 for x in WAVE],
    "one huge outlier": [*WAVE[:20], 1e4, *WAVE[21:]],
    "above what fp16 scales hold": [*WAVE[:20], -1e9, *WAVE[21:]],
    "tiny": [1e-9 * x for x in WAVE],
    "next to nothing": [1e-30 * x for x in WAVE],
    "NaN": [*WAVE[:3], math.nan, *WAVE[4:]],
    "inf": [*WAVE[:3], math.inf, *WAVE[4:]],
    "-inf": [-math.inf, *WAVE[1:]],
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.float16 else tensor.view(torch.uint8)


def same_bits(ours: Tensor, wanted: Tensor) -> bool:
    """NaN equals NaN, whatever its bits."""
    if ours.dtype == torch.float16:
        return torch.equal(ours.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
    return torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def store(rows: Tensor, kv_format: str, which: str) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, head_dim] as the keys of one head, through the op; the values are the same backwards."""
    num_rows, head_dim = rows.shape
    shape = (1, num_rows, 1, head_dim)
    cache = rotary_and_store.empty_cache(shape, rows.dtype, rows.device, kv_format)
    function = REGISTRY["store_kv_cache"].launch if which == "kernel" else reference_store_kv_cache
    slots = torch.arange(num_rows, device=rows.device)
    function(
        rows[:, None], rows.flip(0)[:, None], cache["key_cache"], cache["value_cache"], slots, *list(cache.values())[2:]
    )
    for kind in ("cache", "scales"):
        assert same_bits(cache[f"value_{kind}"], cache[f"key_{kind}"].flip(1))
    return cache["key_cache"][0, :, 0], cache["key_scales"][0, :, 0]


@pytest.mark.parametrize("which", ["reference", "kernel"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_are_stored_by_the_definition(kv_format: str, which: str, device: torch.device) -> None:
    rows = torch.tensor(list(ROWS.values()), device=device)
    data, scales = store(rows, kv_format, which)
    for name, row, ours, our_scales in zip(ROWS, rows.tolist(), data, scales, strict=True):
        codes, wanted_scales = stored(row, kv_format)
        assert ours.view(torch.uint8).tolist() == codes, name
        torch.testing.assert_close(
            our_scales.double().cpu(), torch.tensor(wanted_scales).double(), rtol=0, atol=0, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_is_read_back_is_as_near_as_the_format_allows(kv_format: str) -> None:
    rows = torch.tensor(list(ROWS.values()))
    data, scales = quantize(rows, DTYPES[kv_format])
    read = dequantize(data, scales).double()
    torch.testing.assert_close(read, decoded(data, scales), rtol=1e-6, atol=0, equal_nan=True)
    for name, row, values in zip(ROWS, rows.double(), read, strict=True):
        if not row.isfinite().all():
            assert values.isnan().all(), name  # it stays visible
        elif name == "above what fp16 scales hold":
            assert values.isfinite().all()
        elif name in ("zeros", "tiny", "next to nothing"):
            assert values.abs().max() <= row.abs().max(), name
            assert name != "zeros" or not values.any()
        else:
            error = (values - row).abs()
            if kv_format == "int4":  # half a step, and the minimum's rounding
                bound = 0.5001 * (row.max() - row.min()) / 15 + row.abs().max() * 2**-11
            elif kv_format == "int8":
                bound = 0.501 * row.abs().max() / 127
            else:  # half of the last of 3 bits, and the least that there is
                bound = row.abs() * (2**-4 + 2**-10) + row.abs().max() / 448 * 2**-10
            assert (error <= bound).all(), name


@pytest.mark.parametrize("which", ["reference", "kernel"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_row_stores_the_same_whatever_is_stored_beside_it(kv_format: str, which: str, device: torch.device) -> None:
    rows = torch.tensor(list(ROWS.values()), device=device)
    together = store(rows, kv_format, which)
    for index in range(len(rows)):
        alone = store(rows[index : index + 1], kv_format, which)
        assert all(same_bits(one[0], all_[index]) for one, all_ in zip(alone, together, strict=True))


@pytest.mark.parametrize("which", ["reference", "kernel"])
def test_every_8_bit_float_and_every_tie_between_two(which: str, device: torch.device) -> None:
    """A row whose largest is 448 has a scale of 1."""
    values = E4M3[E4M3.isfinite()]
    ties = (values[:126] + values[1:127]) / 2
    around = torch.cat((ties, -ties, ties * (1 + 2**-20), ties * (1 - 2**-20), values))
    rows = torch.cat((around, around.new_zeros(-len(around) % 31))).view(-1, 31)
    rows = torch.cat((rows, rows.new_full((len(rows), 1), 448.0)), dim=1).float().to(device)
    data, scales = store(rows, "fp8_e4m3", which)
    assert (scales == 1).all()
    wanted = [[nearest_e4m3(x) for x in row] for row in rows.tolist()]
    assert data.view(torch.uint8).tolist() == wanted


@pytest.mark.parametrize("head_dim", [2, 8, 64, 128, 256])
def test_rotation_is_the_hadamard_matrix(head_dim: int) -> None:
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(head_dim)] for i in range(head_dim)]
    matrix = torch.tensor(signs, dtype=torch.float64) / math.sqrt(head_dim)
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(x).double(), x.double() @ matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(rotate(x)), x, atol=1e-5, rtol=1e-5)
    assert rotate(x.half()).dtype == torch.float16


def test_rotation_saves_a_key_with_one_large_channel() -> None:
    """As in models whose keys have a bias: the scale is the outlier's, and without rotation all else is lost."""
    keys = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    keys[:, 5] += 60
    queries = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    scores = queries.double() @ keys.double().T

    def error(rows: Tensor, by: Tensor) -> float:
        read = dequantize(*quantize(rows, torch.uint8)).double()
        return float(((by.double() @ read.T) - scores).std() / scores.std(dim=1).mean())

    assert error(rotate(keys), rotate(queries)) < error(keys, queries) / 2


SHAPES = [(9, 3, 64), (32, 8, 128), (4, 2, 8)]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_rotation_and_store_agree_with_the_reference_bit_by_bit(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_format: str, dtype: torch.dtype, device: torch.device
) -> None:
    sizes = {"num_tokens": 5, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    inputs = rotary_and_store.make_inputs(dtype, device, kv_dtype=kv_format, **sizes)
    inputs["qkv"][1, :head_dim] = 0.0
    inputs["qkv"][2, num_heads * head_dim + 3] = torch.nan  # one key
    inputs["qkv"][3, -1] = torch.inf  # one value
    ours: dict[str, Any]
    wanted: dict[str, Any]
    ours, wanted = ({n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()} for _ in range(2))
    query = REGISTRY["rotary_and_store"].launch(**ours)
    torch.testing.assert_close(query, reference_rotary_and_store(**wanted), atol=0, rtol=0, equal_nan=True)
    assert all(same_bits(ours[name], wanted[name]) for name in CACHES)
    assert int(ours["key_scales"].isnan().any(-1).sum()) == int(ours["value_scales"].isnan().any(-1).sum()) == 1
    assert int((ours["key_scales"] != 0).any(-1).any(-1).sum()) == 5, "a slot for each token, and no other"


def test_rotary_and_store_is_rotary_embedding_then_rotation_then_store(device: torch.device) -> None:
    """By the parts, each of which is tested by itself."""
    inputs = rotary_and_store.make_inputs(torch.float32, device, kv_dtype="int4", head_dim=64)
    heads = inputs["qkv"].view(21, 15, 64)
    query, key = rotary_embedding(heads[:, :9], heads[:, 9:12], inputs["positions"], inputs["cos_sin_cache"])
    parts = {name: inputs[name].clone() for name in CACHES}
    reference_store_kv_cache(
        rotate(key),
        heads[:, 12:],
        slot_mapping=inputs["slot_mapping"],
        **parts,
    )
    assert torch.equal(reference_rotary_and_store(**inputs), rotate(query))
    assert all(same_bits(inputs[name], parts[name]) for name in CACHES)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_store_agrees_with_the_reference_in_caches_of_any_strides(
    kv_format: str, dtype: torch.dtype, device: torch.device
) -> None:
    sizes = {"num_tokens": 7, "num_kv_heads": 3, "head_dim": 40}
    inputs = store_kv_cache.make_inputs(dtype, device, kv_dtype=kv_format, **sizes)
    both = torch.stack([bits(inputs[name]) for name in CACHES[:2]], dim=1).contiguous()
    strided = inputs | {n: both[:, i].view(inputs[n].dtype) for i, n in enumerate(CACHES[:2])}
    strided |= {name: inputs[name].clone() for name in CACHES[2:]}
    assert not strided["key_cache"].is_contiguous()
    REGISTRY["store_kv_cache"].launch(**strided)
    reference_store_kv_cache(**inputs)
    assert all(same_bits(strided[name].contiguous(), inputs[name]) for name in CACHES)
    slots = inputs["slot_mapping"].cpu()
    read = decoded(inputs["key_cache"], inputs["key_scales"]).flatten(0, 1)[slots]
    assert (read - inputs["key"].cpu().double()).abs().max() < {"int4": 0.3, "fp8_e4m3": 0.3, "int8": 0.03}[kv_format]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_scales": None}, "key_scales and value_scales go together; one of them is None"),
        (
            {"key_cache": torch.zeros(4, 16, 3, 64)},
            "key_cache is float32 and has scales; allowed are int8, float8_e4m3fn, uint8",
        ),
        ({"key_scales": torch.zeros(4, 16, 3, 2).half()}, r"key_scales has shape .*; expected \[4, 16, 3, 1\]"),
        ({"value_scales": torch.zeros(4, 16, 3, 1)}, "value_scales is float32; expected float16"),
        (
            {"key_scales": torch.zeros(16, 4, 3, 1).half().transpose(0, 1)},
            "key_scales has strides .*; expected them contig",
        ),
        ({"value_cache": torch.zeros(4, 16, 3, 64)}, "value_cache is float32; expected int8"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    inputs = rotary_and_store.make_inputs(
        torch.float32, torch.device("cpu"), num_blocks=4, head_dim=64, kv_dtype="int8"
    )
    with pytest.raises(ValueError, match=message):
        REGISTRY["rotary_and_store"].launch(**inputs | changes)


def test_int4_of_a_head_dim_that_is_no_power_of_two_is_refused() -> None:
    inputs = rotary_and_store.make_inputs(torch.float32, torch.device("cpu"), head_dim=80, kv_dtype="int4")
    with pytest.raises(ValueError, match="key_cache has a head_dim of 80; of int4 it has to be a power of two"):
        REGISTRY["rotary_and_store"].launch(**inputs)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kv_format", FORMATS)
def test_offsets_beyond_2_31(kv_format: str, device: torch.device) -> None:
    """The last slot of a pool of more than 2^31 elements, and the first."""
    num_blocks = 2**31 // (16 * 8 * 128) + 3
    inputs = store_kv_cache.make_inputs(
        torch.float16, device, num_tokens=2, num_kv_heads=8, head_dim=128, num_blocks=2, kv_dtype=kv_format
    )
    large = rotary_and_store.empty_cache((num_blocks, 16, 8, 128), torch.float16, device, kv_format)
    slots = torch.tensor([num_blocks * 16 - 1, 0], device=device)
    REGISTRY["store_kv_cache"].launch(**inputs | large | {"slot_mapping": slots})
    for name, vectors in (("key", inputs["key"]), ("value", inputs["value"])):
        data, scales = quantize(vectors, DTYPES[kv_format])
        for token, place in ((0, (-1, -1)), (1, (0, 0))):
            assert same_bits(large[f"{name}_cache"][place], data[token])
            assert same_bits(large[f"{name}_scales"][place], scales[token])


def test_fp16_of_the_oracle_is_fp16() -> None:
    assert (fp16(1e9), fp16(-1e9), fp16(0.1), fp16(1e-30)) == (65504.0, -65504.0, 0.0999755859375, 0.0)
