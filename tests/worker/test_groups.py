"""Models with several KV groups: tables and slots of each, and layers that share a pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend.core.kv_format import KV_FORMATS
from backend.core.kv_groups import KVGroupSpec, LayerGroup
from backend.core.output import SchedulerOutput
from backend.models.dummy import DUMMY_SHAPES
from backend.worker.block_transfer import DeviceBlocks, copy_blocks
from backend.worker.input_batch import InputBatch
from backend.worker.kv_cache import KVCacheShape
from backend.worker.step_tensors import HostBuffers, to_device
from tests.worker.step_oracle import check
from tests.worker.test_model_runner import dummy_runner, runner_of
from tests.worker.traffic import Traffic, batch_order

CPU = torch.device("cpu")
SHIFT = 1000  # of the second group's block ids


def in_two_groups(output: SchedulerOutput) -> SchedulerOutput:
    def double(block_ids: list[list[int]]) -> list[list[int]]:
        return [list(block_ids[0]), [block + SHIFT for block in block_ids[0]]]

    return replace(
        output,
        new_requests=[replace(new, block_ids=double(new.block_ids)) for new in output.new_requests],
        new_block_ids={key: double(block_ids) for key, block_ids in output.new_block_ids.items()},
    )


@pytest.mark.parametrize("block_size", [1, 4])
def test_each_group_has_its_own_table_and_slots(block_size: int) -> None:
    """Both groups of a batch over random traffic: the first is what it is alone, the second as far from it as its blocks."""
    traffic = Traffic(2, block_size)
    batch = InputBatch(traffic.max_num_reqs, traffic.max_model_len, block_size, num_groups=2)
    buffers, num_repeats = HostBuffers(CPU), 0
    for _ in range(150):
        alone, jobs = traffic.schedule()
        output, jobs = in_two_groups(alone), batch_order(alone, jobs)
        batch.update(output)
        if batch.repeats(output) is not None:
            new_blocks = batch.build_repeat(output).new_blocks
            firsts = [entry for entry in new_blocks if entry[0] == 0]
            assert [(1, *place, block + SHIFT) for _, *place, block in firsts] == [e for e in new_blocks if e[0] == 1]
            assert sorted(block for *_, block in firsts) == sorted(
                block for (blocks,) in alone.new_block_ids.values() for block in blocks
            )
            num_repeats += bool(new_blocks)
        elif jobs:
            step = batch.build(output)
            check(step, alone, jobs, block_size, traffic.num_blocks)
            first, second = step.block_tables
            assert (second[first > 0] == first[first > 0] + SHIFT).all()
            assert (step.slot_mappings[1] == step.slot_mappings[0] + SHIFT * block_size).all()
            metadata = to_device(step, buffers, CPU).metadata
            for group in range(2):
                assert metadata.of_group(group).block_table.tolist() == step.block_tables[group].tolist()
                assert metadata.of_group(group).slot_mapping.tolist() == step.slot_mappings[group].tolist()
            assert metadata.of_group(1).seq_lens is metadata.seq_lens
        traffic.carry_out(alone)
    assert num_repeats > 2


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_layers_of_different_groups_share_tensors_and_those_of_one_do_not(name: str) -> None:
    """Three full layers and two with a window: two groups of three, one of which has room for a layer that is not there."""
    groups = (LayerGroup(None, (0, 2, 3)), LayerGroup(8, (1, 4)))
    spec = KVGroupSpec(3, 2, 8, 4, format=KV_FORMATS[name])
    shape = KVCacheShape(spec, 4, torch.float32, groups)
    caches = shape.allocate(5, CPU)
    assert [(cache.group, cache.window) for cache in caches] == [(0, None), (1, 8), (0, None), (0, None), (1, 8)]
    owners = [cache.key_cache.data_ptr() for cache in caches]
    assert owners[1] == owners[0]
    assert owners[4] == owners[2]
    assert len({owners[0], owners[2], owners[3]}) == 3
    blocks = DeviceBlocks(caches)
    assert 8 * blocks.width * 6 == 6 * shape.bytes_per_block

    def values(block: int) -> list[torch.Tensor]:
        return [tensor[block].clone() for cache in caches for tensor in cache.tensors()]

    for cache in caches:
        for tensor in cache.tensors():
            tensor.copy_(torch.randint(0, 100, tensor.shape).to(tensor.dtype))
    source, bystander = values(2), values(3)
    copy_blocks(caches, [(2, 4)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values(4), source, strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values(3), bystander, strict=True))


def test_the_pool_of_a_mixed_model_is_counted_to_the_byte() -> None:
    """Two groups of two layers: 2 * 2 * 2 * 16 * 4 bytes a token and block."""
    from backend.models.sources import resolve_source

    runner = runner_of(resolve_source("dummy:tiny-windows"), cache__block_size=16)
    assert [(group.num_layers, group.window) for group in runner.kv_groups] == [(2, None), (2, 32)]
    assert runner.kv_cache_shape.bytes_per_block == 16 * 512
    runner.initialize_kv_cache(9, 100)
    assert runner.memory().kv_cache_bytes == 10 * 16 * 512
    assert len(dummy_runner().kv_groups) == 1
    assert DUMMY_SHAPES["tiny-windows"].windows == (None, None, 32, 32)


@pytest.mark.parametrize(
    ("overrides", "useful"),
    [
        ({"cache__enable_prefix_caching": False}, 4 * (64 + 7)),  # ceil((32 - 1 + 64) / 16) + 1
        ({}, 4 * (64 + 64)),
        ({"cache__layout": "contiguous", "cache__enable_prefix_caching": False}, 4 * (64 + 64)),
    ],
)
def test_no_more_blocks_than_windows_let_requests_use(overrides: dict[str, object], useful: int) -> None:
    from backend.models.sources import resolve_source

    source = resolve_source("dummy:tiny-windows")
    runner = runner_of(source, scheduler__max_num_batched_tokens=64, cache__block_size=16, **overrides)
    assert runner.determine_num_blocks() == useful
