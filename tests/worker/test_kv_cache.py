"""Sizes of the paged cache against published figures, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_format import KV_FORMATS, KVFormat
from backend.errors import CapacityError
from backend.worker.kv_cache import KVCacheShape

CPU = torch.device("cpu")
QUANTIZED = [kv_format for kv_format in KV_FORMATS.values() if kv_format.num_scales]


def shape_of(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> KVCacheShape:
    return KVCacheShape(KVGroupSpec(layers, kv_heads, head_dim, dtype.itemsize), block_size, dtype)


SMALL = shape_of(3, 2, 8, torch.float32)  # 3 * 2 (K and V) * 2 * 8 * 4 bytes = 384 a token, 6,144 a block


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "dtype", "bytes_per_token"),
    [
        pytest.param(32, 8, 128, torch.bfloat16, 131_072, id="Llama 3 8B: 128 KiB"),
        pytest.param(80, 8, 128, torch.bfloat16, 327_680, id="Llama 3 70B: 320 KiB"),
        pytest.param(32, 32, 128, torch.float16, 524_288, id="Llama 2 7B: 512 KiB"),
        pytest.param(40, 40, 128, torch.float16, 819_200, id="Llama 2 13B: 800 KiB, as in the PagedAttention paper"),
        pytest.param(30, 3, 64, torch.float32, 46_080, id="SmolLM2 135M in fp32: 45 KiB"),
    ],
)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_bytes_per_block_follow_published_models(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, bytes_per_token: int, block_size: int
) -> None:
    shape = shape_of(layers, kv_heads, head_dim, dtype, block_size)
    assert shape.group.bytes_per_token == bytes_per_token
    assert shape.bytes_per_block == block_size * bytes_per_token


@pytest.mark.parametrize(
    ("num_bytes", "num_blocks"),
    [(2 * 6144, 1), (3 * 6144 - 1, 1), (3 * 6144, 2), (3 * 6144 + 1, 2), (2**20, 169)],
)
def test_one_block_of_what_fits_is_the_null_block(num_bytes: int, num_blocks: int) -> None:
    assert SMALL.bytes_per_block == 6144
    assert SMALL.blocks_in(num_bytes, "the budget") == num_blocks


@pytest.mark.parametrize(("num_bytes", "shown"), [(2 * 6144 - 1, "12,287"), (6144, "6,144"), (0, "0"), (-5, "0")])
def test_too_little_for_two_blocks_names_both_numbers(num_bytes: int, shown: str) -> None:
    with pytest.raises(CapacityError) as caught:
        SMALL.blocks_in(num_bytes, "cache.cpu_bytes = 12,287")
    message = str(caught.value)
    assert message.startswith(f"cache.cpu_bytes = 12,287 leaves {shown} bytes for the KV cache")
    assert "one block of 16 tokens takes 6,144 and two are the least" in message
    assert "\n" not in message


def test_what_is_allocated_takes_the_bytes_that_were_counted() -> None:
    caches = SMALL.allocate(5, CPU)
    tensors = [tensor for cache in caches for tensor in (cache.key_cache, cache.value_cache)]
    assert len(caches) == 3
    assert {tuple(tensor.shape) for tensor in tensors} == {(6, 16, 2, 8)}
    assert sum(tensor.nbytes for tensor in tensors) == 6 * SMALL.bytes_per_block
    assert len({tensor.data_ptr() for tensor in tensors}) == 6, "no layer shares memory with another"
    assert all(tensor.is_contiguous() and not tensor.any() for tensor in tensors)


def test_what_fits_exactly_is_given_and_a_byte_less_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 6 * SMALL.bytes_per_block
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    assert len(SMALL.allocate(5, CPU)) == 3
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(CapacityError, match="the KV cache of 5 blocks needs"):
        SMALL.allocate(5, CPU)


def test_more_than_the_machine_has_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerCache, "zeros", lambda *args: pytest.fail("memory was asked for"))
    shape = shape_of(32, 8, 128, torch.bfloat16)  # 2 MiB a block
    num_blocks = psutil.virtual_memory().total // shape.bytes_per_block
    mebibytes = (num_blocks + 1) * 2
    with pytest.raises(CapacityError) as caught:
        shape.allocate(num_blocks, CPU)
    message = str(caught.value)
    assert f"the KV cache of {num_blocks:,} blocks needs {mebibytes:,.1f} MiB" in message
    assert "cache.num_blocks" in message
    assert "cache.cpu_bytes" in message


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_an_allocator_that_fails_is_reported_in_our_words(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(LayerCache, "zeros", fail)
    with pytest.raises(CapacityError, match="the KV cache of 5 blocks needs") as caught:
        SMALL.allocate(5, CPU)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("name", "bytes_per_vector"), [("auto", 128), ("fp8_e4m3", 64 + 2), ("int8", 64 + 2), ("int4", 64 // 2 + 4)]
)
def test_scales_are_counted(name: str, bytes_per_vector: int) -> None:
    """Closed form at a head_dim of 64 beside 16 bits: 1.94, 1.94 and 3.56 times the blocks."""
    group = KVGroupSpec(30, 3, 64, 2, format=KV_FORMATS[name])
    shape = KVCacheShape(group, 16, torch.bfloat16)
    assert shape.bytes_per_block == 16 * 30 * 2 * 3 * bytes_per_vector
    caches = shape.allocate(4, CPU)
    tensors = [tensor for cache in caches for tensor in cache.tensors()]
    assert len(tensors) == 30 * (2 if name == "auto" else 4)
    assert {len(tensor) for tensor in tensors} == {5}
    assert sum(tensor.nbytes for tensor in tensors) == 5 * shape.bytes_per_block
    assert not any(tensor.any() for tensor in tensors)
    assert 128 / bytes_per_vector >= {"auto": 1, "fp8_e4m3": 1.93, "int8": 1.93, "int4": 3.5}[name]


@pytest.mark.parametrize("kv_format", QUANTIZED, ids=lambda it: it.name)
def test_blocks_that_are_copied_by_their_tensors_hold_the_same(kv_format: KVFormat) -> None:
    """And a cache without what is not among them would attend to something else."""
    cache = LayerCache.zeros(4, 16, 2, 8, torch.float32, CPU, kv_format)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, heads, 8, generator=generator) for heads in (4, 2, 2))
    attention, positions = ReferenceAttention(), torch.arange(20)

    def metadata(*blocks: int) -> AttentionMetadata:
        slots = torch.tensor(blocks).repeat_interleave(16)[:20] * 16 + positions % 16
        lens = torch.tensor([20], dtype=torch.int32)
        starts = torch.tensor([0, 20], dtype=torch.int32)
        return AttentionMetadata(starts, lens, torch.tensor([blocks], dtype=torch.int32), slots, positions, 0)

    query = attention.write(query, key, value, cache, metadata(1, 2))
    expected = attention.forward(query, cache, metadata(1, 2), 0.3)
    for tensor in cache.tensors():
        tensor[torch.tensor([4, 3])] = tensor[torch.tensor([1, 2])]
        tensor[1:3] = 0
    assert torch.equal(attention.forward(query, cache, metadata(4, 3), 0.3), expected)
    assert not torch.equal(attention.forward(query, cache, metadata(1, 2), 0.3), expected)
