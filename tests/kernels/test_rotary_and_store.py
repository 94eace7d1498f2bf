from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference.kv_quantization import DTYPES
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.store_kv_cache import store_kv_cache
from kernels.registry import REGISTRY
from tests.kernels.kv_oracle import decoded
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

IMPLEMENTATIONS = ["reference", "launch"]


def implementation(name: str) -> Callable[..., Tensor]:
    return getattr(REGISTRY["rotary_and_store"], name)


def make_inputs(dtype: torch.dtype, device: torch.device, **sizes: int) -> dict[str, Any]:
    return REGISTRY["rotary_and_store"].make_inputs(dtype, device, **sizes)


def composed(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query and both caches by the references of the parts, whose own oracles are transformers and a loop over slots."""
    num_heads, num_kv_heads, head_dim = inputs["num_heads"], *inputs["key_cache"].shape[2:]
    heads = inputs["qkv"].reshape(-1, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if inputs.get("q_norm_weight") is not None:
        query, key = (
            torch.stack([rms_norm(head, inputs[name], inputs["eps"]) for head in part.unbind(1)], dim=1)
            for part, name in ((query, "q_norm_weight"), (key, "k_norm_weight"))
        )
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


NORMED_HEADS = [(9, 3, 64, 16), (32, 8, 128, 16), (14, 2, 80, 8), (1, 1, 256, 1), (5, 5, 6, 16)]
# A quotient in fp32 with a sum in another order; it then tips few of the roundings to 16 bits, each by a unit in the last place.
NORMED_TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
MOST_TIPPED = 0.02


def normed_inputs(dtype: torch.dtype, device: torch.device, **sizes: Any) -> dict[str, Any]:
    """Of tokens of other scales too: eps outweighs the mean square of one, and another's has to be divided by much."""
    inputs = make_inputs(dtype, device, num_tokens=7, num_blocks=10, qk_norm=True, **sizes)
    inputs["qkv"][1] *= 1e-3
    inputs["qkv"][2] *= 100
    inputs["qkv"][3] = 0
    return inputs


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), NORMED_HEADS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_with_norms_is_each_heads_norm_the_rotation_and_then_the_store(
    which: str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
) -> None:
    inputs = normed_inputs(
        dtype, device, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )
    for cache in (inputs["key_cache"], inputs["value_cache"]):
        cache.fill_(-1.0)
    query, key_cache, value_cache = composed(inputs)
    bands = GuardBands()
    names = ("qkv", "cos_sin_cache", "key_cache", "value_cache", "q_norm_weight", "k_norm_weight")
    inputs |= {name: bands.wrap(inputs[name]) for name in names}
    qkv = inputs["qkv"].clone()
    ours = implementation(which)(**inputs)
    bands.assert_untouched()
    assert ours.is_contiguous()
    assert torch.equal(inputs["qkv"], qkv)
    assert torch.equal(inputs["value_cache"], value_cache)
    for actual, wanted in ((ours, query), (inputs["key_cache"], key_cache)):
        atol, rtol = (0.0, 0.0) if which == "reference" else NORMED_TOLERANCES[dtype]
        # Of a pair's rotation one element may cancel: by the largest of a head.
        scale = wanted.abs().float().amax(-1, keepdim=True)
        assert actual.dtype == dtype
        assert ((actual.float() - wanted.float()).abs() <= atol + rtol * scale).all()
        if dtype != torch.float32:
            assert (actual != wanted).float().mean() <= MOST_TIPPED


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_norms_come_before_what_is_quantized(kv_dtype: str, device: torch.device) -> None:
    inputs = normed_inputs(torch.float32, device, head_dim=64, kv_dtype=kv_dtype)
    mine, wanted = ({n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()} for _ in range(2))
    query = implementation("launch")(**mine)
    torch.testing.assert_close(query, implementation("reference")(**wanted), atol=1e-5, rtol=1e-5)
    for name in ("key", "value"):
        read, expected = (decoded(each[f"{name}_cache"], each[f"{name}_scales"]) for each in (mine, wanted))
        assert expected.abs().max() > 1
        tipped = (read - expected).abs() > 1e-2
        assert tipped.float().mean() < 1e-3, "a value on the edge between two codes may fall to either"
        assert torch.equal(read, expected) or name == "key"


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_no_value_is_normalised_and_no_head_by_anothers_elements(which: str, device: torch.device) -> None:
    inputs = normed_inputs(torch.float32, device, head_dim=64)
    inputs["positions"].zero_()  # where nothing is rotated
    inputs["qkv"][0, 64 : 2 * 64] = 1e6
    inputs["qkv"][0, 9 * 64] = torch.nan  # a key of head 0
    inputs["qkv"][0, -1] = torch.inf
    query = implementation(which)(**inputs)
    exact = inputs["qkv"][:, : 9 * 64].view(-1, 9, 64).double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + inputs["eps"]).sqrt() * inputs["q_norm_weight"].double()
    torch.testing.assert_close(query.double(), exact, atol=1e-5, rtol=1e-5)
    slot = int(inputs["slot_mapping"][0])
    key, value = (inputs[name][slot // 16, slot % 16] for name in ("key_cache", "value_cache"))
    assert key[0].isnan().all()
    assert key[1:].isfinite().all()
    assert torch.equal(value.flatten(), inputs["qkv"][0, -len(value.flatten()) :])


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
        ({"q_norm_weight": torch.ones(64)}, "q_norm_weight and k_norm_weight go together; one of them is None"),
        ({"k_norm_weight": torch.ones(64)}, "q_norm_weight and k_norm_weight go together; one of them is None"),
        (
            {"q_norm_weight": torch.ones(64), "k_norm_weight": torch.ones(32)},
            r"k_norm_weight has shape \[32\]; expected \[64\]",
        ),
        (
            {"q_norm_weight": torch.ones(64).half(), "k_norm_weight": torch.ones(64)},
            "q_norm_weight is float16; expected float32",
        ),
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
