from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.reference.store_kv_cache import store_kv_cache as reference
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

IMPLEMENTATIONS = ["reference", "launch"]


def implementation(name: str) -> Callable[..., None]:
    return getattr(REGISTRY["store_kv_cache"], name)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (8, 80), (2, 96), (1, 128)])
def test_each_slot_holds_its_token_and_the_others_are_left(
    which: str, block_size: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> None:
    inputs = REGISTRY["store_kv_cache"].make_inputs(
        torch.float32,
        device,
        num_tokens=7,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=10,
    )
    bands = GuardBands()
    inputs |= {name: bands.wrap(inputs[name]) for name in ("key", "value", "key_cache", "value_cache")}
    for cache in (inputs["key_cache"], inputs["value_cache"]):
        cache.fill_(-1.0)
    implementation(which)(**inputs)
    bands.assert_untouched()
    slots = inputs["slot_mapping"].tolist()
    for tensor, cache in (("key", "key_cache"), ("value", "value_cache")):
        for token, slot in enumerate(slots):
            stored = inputs[cache][slot // block_size, slot % block_size]
            assert torch.equal(stored, inputs[tensor][token])
        others = [slot for slot in range(10 * block_size) if slot not in slots]
        assert (inputs[cache].flatten(0, 1)[others] == -1.0).all()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_takes_slices_of_a_merged_projection(which: str, dtype: torch.dtype, device: torch.device) -> None:
    merged = torch.randn(4, 15, 64, device=device).to(dtype)
    before = merged.clone()
    _, key, value = merged.split((9, 3, 3), dim=1)
    assert key.stride() == (15 * 64, 64, 1)
    key_cache, value_cache = (torch.zeros(3, 16, 3, 64, dtype=dtype, device=device) for _ in range(2))
    slots = torch.tensor([47, 16, 17, 32], device=device)
    implementation(which)(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache.view(48, 3, 64)[slots], key)
    assert torch.equal(value_cache.view(48, 3, 64)[slots], value)
    assert torch.equal(merged, before)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_padding_shares_a_slot_of_the_null_block(which: str, device: torch.device) -> None:
    inputs = REGISTRY["store_kv_cache"].make_inputs(torch.float32, device, num_tokens=5)
    inputs["slot_mapping"][2:] = 0
    implementation(which)(**inputs)
    # On a GPU the writers race, and each element may be another's.
    assert (inputs["key_cache"][0, 0] == inputs["key"][2:]).any(0).all()
    assert not inputs["key_cache"][0, 1:].any()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_tokens(which: str, device: torch.device) -> None:
    inputs = REGISTRY["store_kv_cache"].make_inputs(torch.float32, device, num_tokens=0)
    implementation(which)(**inputs)
    assert not inputs["key_cache"].any()


def test_kernel_takes_a_cache_of_any_strides(device: torch.device) -> None:
    """Keys and values of a block side by side, as one tensor per layer would hold them."""
    inputs = REGISTRY["store_kv_cache"].make_inputs(torch.float32, device)
    both = torch.zeros(2, *inputs["key_cache"].shape, device=device).transpose(0, 1).contiguous()
    strided = inputs | {"key_cache": both[:, 0], "value_cache": both[:, 1]}
    assert not strided["key_cache"].is_contiguous()
    REGISTRY["store_kv_cache"].launch(**strided)
    reference(**inputs)
    assert torch.equal(strided["key_cache"], inputs["key_cache"])
    assert torch.equal(strided["value_cache"], inputs["value_cache"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 3, 64).long()}, "key is int64; allowed are float32"),
        ({"key": torch.zeros(2, 192)}, r"key has shape \[2, 192\]; expected \[any, any, any\]"),
        ({"value": torch.zeros(2, 3, 32)}, r"value has shape \[2, 3, 32\]; expected \[2, 3, 64\]"),
        ({"key_cache": torch.zeros(4, 16, 2, 64)}, r"key_cache has shape .*; expected \[any, any, 3, 64\]"),
        ({"value_cache": torch.zeros(4, 8, 3, 64)}, r"value_cache has shape .*; expected \[4, 16, 3, 64\]"),
        ({"value_cache": torch.zeros(4, 16, 3, 64).half()}, "value_cache is float16; expected float32"),
        ({"key_cache": torch.zeros(4, 16, 64, 3).transpose(2, 3)}, "key_cache has stride 3 in its last dimension"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is int32; expected int64"),
        ({"slot_mapping": torch.zeros(3).long()}, r"slot_mapping has shape \[3\]; expected \[2\]"),
        ({"slot_mapping": torch.zeros(2, device="meta").long()}, "slot_mapping is on meta; expected cpu"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    cache, token = torch.zeros(4, 16, 3, 64), torch.zeros(2, 3, 64)
    inputs = {"key": token, "value": token, "key_cache": cache, "value_cache": cache, "slot_mapping": torch.arange(2)}
    with pytest.raises(ValueError, match=message):
        REGISTRY["store_kv_cache"].launch(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    num_blocks = 2**31 // (16 * 8 * 128) + 2
    key_cache, value_cache = (torch.zeros(num_blocks, 16, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    key, value = (torch.randn(3, 8, 128, device="cuda").half() for _ in range(2))
    slots = torch.tensor([num_blocks * 16 - 1, 0, (num_blocks - 1) * 16], device="cuda")
    assert int(slots[2]) * 8 * 128 >= 2**31
    REGISTRY["store_kv_cache"].launch(key, value, key_cache, value_cache, slots)
    for tensor, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, 8, 128)
        assert torch.equal(torch.stack([flat[slot] for slot in slots.tolist()]), tensor)
        assert int(flat[:100].any(-1).any(-1).sum()) == 1
