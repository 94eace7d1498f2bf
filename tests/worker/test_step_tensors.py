"""A step's arrays against the tensors that the model reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.worker.input_batch import InputBatch, StepInput
from backend.worker.step_tensors import (
    COPIES_PER_STEP,
    STEPS_UNDER_WAY,
    HostBuffers,
    StepTensors,
    to_device,
    write_parts,
)
from tests.worker.traffic import Traffic

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def steps(seed: int, count: int) -> list[StepInput]:
    traffic = Traffic(seed, block_size=4)
    batch = InputBatch(traffic.max_num_reqs, traffic.max_model_len, traffic.block_size)
    built: list[StepInput] = []
    while len(built) < count:
        output, jobs = traffic.schedule()
        batch.update(output)
        built += [batch.build(output)] if jobs else []
        traffic.carry_out(output)
    return built


def assert_equal(tensors: StepTensors, step: StepInput, device: torch.device) -> None:
    metadata = tensors.metadata
    assert metadata.num_decodes == step.num_decodes
    pairs = [(tensors, name) for name in ("token_ids", "token_rows", "logits_indices", "sampled_rows")]
    pairs += [(metadata, name) for name in ("query_start_loc", "seq_lens", "positions")]
    arrays = [(getattr(owner, name), getattr(step, name)) for owner, name in pairs]
    for group in range(len(step.block_tables)):
        of_group = metadata.of_group(group)
        assert of_group.seq_lens is metadata.seq_lens
        arrays.append((of_group.block_table, step.block_tables[group]))
        arrays.append((of_group.slot_mapping, step.slot_mappings[group]))
    assert len(metadata.other_groups) == len(step.block_tables) - 1
    for tensor, array in arrays:
        assert tensor.is_contiguous()
        assert tensor.device.type == device.type
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert str(tensor.dtype) == f"torch.{array.dtype}"
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_tensors_equal_the_arrays_and_outlive_the_buffers(device: torch.device) -> None:
    """Every step's tensors are looked at again after the buffers went round twice."""
    built = steps(seed=5, count=60)
    buffers = HostBuffers(device)
    kept: list[StepTensors] = []
    for step in built:
        kept.append(to_device(step, buffers, device))
        assert_equal(kept[-1], step, device)
    assert len(kept) > 2 * STEPS_UNDER_WAY * COPIES_PER_STEP
    for tensors, step in zip(kept, built, strict=True):
        assert_equal(tensors, step, device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_step_larger_than_the_buffers(device: torch.device) -> None:
    num_reqs, width = 300, 2000
    table = np.arange(num_reqs * width, dtype=np.int32).reshape(num_reqs, width)
    ids = np.arange(num_reqs)
    step = StepInput(
        token_ids=ids,
        token_rows=ids + 1,
        positions=ids + 2,
        slot_mappings=ids[None] + 3,
        query_start_loc=np.arange(num_reqs + 1, dtype=np.int32),
        seq_lens=np.arange(num_reqs, dtype=np.int32),
        block_tables=table[None],
        num_decodes=num_reqs,
        sampled_request_ids=[],
        sampled_reqs=ids[:0],
        sampled_rows=ids[:0],
        logits_indices=ids[:0],
        sampling=None,
    )
    assert table.nbytes > 2**20
    assert_equal(to_device(step, HostBuffers(device), device), step, device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_buffer_is_not_given_out_again_too_early(device: torch.device) -> None:
    """Its bytes stay for as many calls as three steps may make, also when one has to grow in between."""
    buffers = HostBuffers(device, copies_per_step=2)
    for size in (8, 2**20 + 8, 8, 2**22):
        held = [buffers.next(size if turn == 0 else 16) for turn in range(3 * 2)]
        assert held[0].shape == (size,)
        assert all(buffer.is_pinned() == (device.type == "cuda") for buffer in held)
        for value, buffer in enumerate(held):
            buffer.fill_(value)
        assert all((buffer == value).all() for value, buffer in enumerate(held))


def test_parts_lie_end_to_end() -> None:
    buffer = torch.full((40,), 7, dtype=torch.uint8)
    write_parts(buffer, [np.array([[1], [2]]), np.array([], dtype=np.int64), np.array([3, 4], dtype=np.int32)])
    assert buffer[:16].view(torch.int64).tolist() == [1, 2]
    assert buffer[16:24].view(torch.int32).tolist() == [3, 4]
    assert (buffer[24:] == 7).all()
