from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.store_kv_cache import store_kv_cache
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

IMPLEMENTATIONS = ["reference", "launch"]


def implementation(name: str) -> Callable[..., Tensor]:
    return getattr(REGISTRY["rotary_and_store"], name)


def make_inputs(dtype: torch.dtype, device: torch.device, **sizes: int) -> dict[str, Any]:
    return REGISTRY["rotary_and_store"].make_inputs(dtype, device, **sizes)


def composed(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query and both caches by the two references, whose own oracles are transformers and a loop over slots."""
    num_heads, num_kv_heads, head_dim = inputs["num_heads"], *inputs["key_cache"].shape[2:]
    heads = inputs["qkv"].reshape(-1, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    query, key = rotary_embedding(query, key, inputs["positions"], inputs["cos_sin_cache"])
    key_cache, value_cache = inputs["key_cache"].clone(), inputs["value_cache"].clone()
    store_kv_cache(key, value, key_cache, value_cache, inputs["slot_mapping"])
    return query, key_cache, value_cache


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (32, 8, 128, 16), (14, 2, 80, 8), (12, 4, 96, 24), (1, 1, 256, 1), (24, 1, 2, 32), (5, 5, 6, 16)],
)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_is_the_rotation_and_then_the_store(
    which: str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
) -> None:
    inputs = make_inputs(
        dtype,
        device,
        num_tokens=7,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=10,
    )
    for cache in (inputs["key_cache"], inputs["value_cache"]):
        cache.fill_(-1.0)  # what is not a token's slot keeps it
    expected = composed(inputs)
    bands = GuardBands()
    inputs |= {n: bands.wrap(inputs[n]) for n in ("qkv", "cos_sin_cache", "key_cache", "value_cache")}
    qkv = inputs["qkv"].clone()
    query = implementation(which)(**inputs)
    bands.assert_untouched()
    assert query.is_contiguous()
    assert torch.equal(inputs["qkv"], qkv)
    # Bit for bit: the kernel rounds every product, as torch does.
    for ours, wanted in zip((query, inputs["key_cache"], inputs["value_cache"]), expected, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, wanted)


def test_kernel_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(torch.float32, device, head_dim=80)
    expected, _, _ = composed(inputs)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    query = REGISTRY["rotary_and_store"].launch(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert torch.equal(query, expected)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_caches_of_any_strides_and_rows_of_a_wider_tensor(which: str, device: torch.device) -> None:
    """Keys and values of a block side by side, heads before slots, as one tensor per layer might hold them."""
    inputs = make_inputs(torch.float32, device)
    expected = composed(inputs)
    num_blocks, block_size, num_kv_heads, head_dim = inputs["key_cache"].shape
    both = torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim, device=device).transpose(2, 3)
    wide = torch.cat((inputs["qkv"], torch.full((21, 7), torch.nan, device=device)), dim=1)
    strided = inputs | {"key_cache": both[:, 0], "value_cache": both[:, 1], "qkv": wide[:, :-7]}
    with pytest.raises(RuntimeError):
        strided["key_cache"].view(-1, num_kv_heads, head_dim)
    query = implementation(which)(**strided)
    for ours, wanted in zip((query, both[:, 0], both[:, 1]), expected, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_a_value_that_is_not_finite_arrives_as_it_is(which: str, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=1)
    inputs["positions"].zero_()  # where sines are zero
    inputs["qkv"][0, -1] = torch.inf
    implementation(which)(**inputs)
    slot = int(inputs["slot_mapping"])
    stored = inputs["value_cache"][slot // 16, slot % 16].flatten()
    assert torch.equal(stored, inputs["qkv"][0, -len(stored) :])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_padding_shares_a_slot_of_the_null_block(which: str, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=5)
    values = inputs["qkv"].view(5, 15, 80)[:, 12:]
    inputs["slot_mapping"][2:] = 0
    implementation(which)(**inputs)
    # On a GPU the writers race, and each element may be another's.
    assert (inputs["value_cache"][0, 0] == values[2:]).any(0).all()
    assert not inputs["key_cache"][0, 1:].any()
    for token, slot in enumerate(inputs["slot_mapping"][:2].tolist()):
        assert torch.equal(inputs["value_cache"][slot // 16, slot % 16], values[token])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_tokens(which: str, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=0)
    assert implementation(which)(**inputs).shape == (0, 9, 80)
    assert not inputs["key_cache"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(2, 960).long()}, "qkv is int64; allowed are float32"),
        ({"qkv": torch.zeros(2, 15, 64)}, r"qkv has shape \[2, 15, 64\]; expected \[any, 960\]"),
        ({"qkv": torch.zeros(2, 959)}, r"qkv has shape \[2, 959\]; expected \[any, 960\]"),
        ({"num_heads": 8}, r"qkv has shape \[2, 960\]; expected \[any, 896\]"),
        ({"num_heads": 0}, "num_heads is 0; allowed are 1 and more"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions is int32; expected int64"),
        ({"positions": torch.zeros(3).long()}, r"positions has shape \[3\]; expected \[2\]"),
        ({"cos_sin_cache": torch.zeros(8, 32)}, r"cos_sin_cache has shape \[8, 32\]; expected \[any, 64\]"),
        ({"cos_sin_cache": torch.zeros(8, 64).half()}, "cos_sin_cache is float16; expected float32"),
        ({"value_cache": torch.zeros(4, 8, 3, 64)}, r"value_cache has shape .*; expected \[4, 16, 3, 64\]"),
        ({"key_cache": torch.zeros(4, 16, 3, 64).half()}, "key_cache is float16; expected float32"),
        ({"value_cache": torch.zeros(4, 16, 64, 3).transpose(2, 3)}, "value_cache has stride 3 in its last dimension"),
        ({name: torch.zeros(4, 16, 3, 63) for name in ("key_cache", "value_cache")}, "a head_dim of 63; allowed are"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is int32; expected int64"),
        ({"slot_mapping": torch.zeros(2, device="meta").long()}, "slot_mapping is on meta; expected cpu"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "qkv": torch.zeros(2, 15 * 64),
        "positions": torch.arange(2),
        "cos_sin_cache": torch.zeros(8, 64),
        "key_cache": torch.zeros(4, 16, 3, 64),
        "value_cache": torch.zeros(4, 16, 3, 64),
        "slot_mapping": torch.arange(2),
        "num_heads": 9,
    }
    with pytest.raises(ValueError, match=message):
        REGISTRY["rotary_and_store"].launch(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    num_blocks = 2**31 // (16 * 8 * 128) + 2
    small = make_inputs(torch.float16, torch.device("cuda"), num_tokens=3, num_heads=32, num_kv_heads=8, head_dim=128)
    _, key_cache, value_cache = composed(small | {"slot_mapping": torch.tensor([47, 0, 32], device="cuda")})
    shape = (num_blocks, 16, 8, 128)
    large = {name: torch.zeros(shape, dtype=torch.float16, device="cuda") for name in ("key_cache", "value_cache")}
    slots = torch.tensor([num_blocks * 16 - 1, 0, (num_blocks - 1) * 16], device="cuda")
    assert int(slots[2]) * 8 * 128 >= 2**31
    REGISTRY["rotary_and_store"].launch(**(small | large | {"slot_mapping": slots}))
    for ours, wanted in ((large["key_cache"], key_cache), (large["value_cache"], value_cache)):
        assert torch.equal(ours[-1], wanted[2])
        assert torch.equal(ours[0], wanted[0])
        assert not ours[1:100].any()
