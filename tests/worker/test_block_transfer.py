"""Blocks are copied whole, in every layer, and nothing else is touched."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from backend.attention.metadata import LayerCache
from backend.core.kv_format import KV_FORMATS
from backend.worker import block_transfer
from backend.worker.block_transfer import BlockTransfer, DeviceBlocks, HostBlocks, copy_blocks

NUM_BLOCKS = 7
CPU = torch.device("cpu")


def random_caches(name: str = "auto", block_size: int = 4, device: torch.device = CPU) -> list[LayerCache]:
    generator = torch.Generator().manual_seed(0)
    spec = KV_FORMATS[name]
    caches = [LayerCache.zeros(NUM_BLOCKS, block_size, 1, 6, torch.float16, device, spec) for _ in range(3)]
    for cache in caches:
        for tensor in cache.tensors():
            tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype))
    return caches


def contents(caches: list[LayerCache]) -> list[Tensor]:
    return [tensor.clone() for cache in caches for tensor in cache.tensors()]


def check(caches: list[LayerCache], before: list[Tensor], source_of: dict[int, int]) -> None:
    """Each block of every tensor holds what its source held before; those without one, what they held themselves."""
    assert len(before) >= 6
    for after, tensor in zip(contents(caches), before, strict=True):
        expected = [tensor[source_of.get(block, block)] for block in range(NUM_BLOCKS + 1)]
        assert torch.equal(after, torch.stack(expected))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_all_sources_are_read_before_anything_is_written(name: str) -> None:
    caches = random_caches(name)
    before = contents(caches)
    copies = [(3, 5), (5, 2), (3, 7), (2, 3)]
    copy_blocks(caches, copies)
    check(caches, before, {destination: source for source, destination in copies})


@pytest.mark.parametrize("staging_bytes", [1, 700, 2**26])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_out_and_back_to_other_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, staging_bytes: int
) -> None:
    """Through host blocks that lie in a row and that do not, in one go and block by block; odd sizes of a block included."""
    monkeypatch.setattr(block_transfer, "STAGING_BYTES", staging_bytes)
    caches = random_caches(name, block_size)
    before = contents(caches)
    pool, transfer = DeviceBlocks(caches), BlockTransfer(CPU)
    host = HostBlocks(6, pool.width, CPU)
    host.rows.fill_(-1)
    out = [(2, 1), (6, 2), (7, 3), (1, 5)]
    transfer.copy(out, pool, host).wait()
    check(caches, before, {})
    assert host.rows[[0, 4]].eq(-1).all()
    back = [(5, 3), (1, 4), (3, 1)]
    transfer.copy(back, host, pool).wait()
    source_of = {host_block: block for block, host_block in out}
    check(caches, before, {block: source_of[host_block] for host_block, block in back})
    transfer.copy([], host, pool).wait()


@pytest.mark.gpu
def test_copies_on_a_card_keep_the_order_of_the_stream() -> None:
    """Written, sent out, overwritten and brought back many times without waiting: the last word is the order's."""
    device = torch.device("cuda")
    caches = random_caches("fp8_e4m3", device=device)
    pool, transfer = DeviceBlocks(caches), BlockTransfer(device)
    host = HostBlocks(NUM_BLOCKS, pool.width, device)
    assert host.rows.is_pinned()
    rng, expected = random.Random(0), [tensor.cpu() for tensor in contents(caches)]
    for _ in range(200):
        blocks = rng.sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
        transfer.copy([(block, place) for place, block in enumerate(blocks)], pool, host)
        for cache in caches:
            for tensor in cache.tensors():
                tensor.zero_()
        moved = [(place, following) for place, (_, following) in enumerate(pairwise([*blocks, blocks[0]]))]
        transfer.copy(moved, host, pool)
        source_of = {destination: blocks[place] for place, destination in moved}
        for tensor in expected:
            tensor[1:] = torch.stack([tensor[source_of[block]] for block in range(1, NUM_BLOCKS + 1)])
            tensor[0] = 0
    for after, tensor in zip(contents(caches), expected, strict=True):
        assert torch.equal(after.cpu(), tensor)
