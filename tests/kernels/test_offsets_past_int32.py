"""Offsets that no int32 holds, on a machine without a GPU: tensors spread over memory that is never touched.

A pool, a batch's logits or a vocabulary's weights may pass 2^31 elements; where one product on the way to an address is an
int32, rows past that are read and written elsewhere. Each tensor of each kernel is laid out with rows so far apart that
the offsets of the later ones exceed an int32, and the interpreter, whose arithmetic has the widths of a GPU's, runs it.
"""

from __future__ import annotations

import mmap
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.kernel_op import KernelOp
from kernels.registry import REGISTRY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter; a GPU allocates it all")

INT32 = 2**31
CPU = torch.device("cpu")
# Linux's value, which the module names from Python 3.13 on: room is taken page by page as it is touched.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
# What never has so many elements: sums of some columns of a token each, tables of block ids, and the slots of one block.
SMALL = {"square_sums", "block_table", ("key_cache", 1), ("value_cache", 1)}
# A number or two for each weight row or block, taken contiguous: a launcher refuses other strides. So are whole caches.
BYTE_OPS = ("fp8_linear", "int8_linear", "byte_gated_linear", "byte_qkv_rotary_store")
NF4_OPS = ("nf4_linear", "nf4_gated_linear", "nf4_qkv_rotary_store")
DENSE = {("compact_kv_cache", "caches"), ("settle_round", "ids"), *((name, "scales") for name in BYTE_OPS)}
DENSE |= {(name, numbers) for name in NF4_OPS for numbers in ("steps", "means")}


def untouched(num_elements: int, dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # 4 KiB for each row, not 2 MiB
    return torch.frombuffer(memory, dtype=dtype)


def spread_out(tensor: Tensor, dim: int) -> Tensor:
    """Equal to `tensor`, its rows along `dim` apart: of two the last ends, of more the upper half begins past 2^31.

    An offset that went round, to -2^31 at the least, still leads into the memory: to zeros, not to the end of the process.
    """
    num_rows = tensor.shape[dim]
    strides = list(tensor.movedim(dim, 0).contiguous().movedim(0, dim).stride())
    # A stride that is no int32 itself would make the product an int64 without the kernel's help.
    strides[dim] = min(INT32 // (num_rows // 2), INT32 - 16) // 16 * 16  # rows that begin at whole 16 bytes
    length = (num_rows - 1) * strides[dim] + tensor.numel() // num_rows
    assert length > INT32
    return untouched(INT32 + length, tensor.dtype).as_strided(tensor.shape, strides, INT32).copy_(tensor)


def cases() -> list[Any]:
    """Every tensor and dimension that has a stride of its own and more than one row."""
    return [
        pytest.param(op, name, dim, id=f"{op.name}-{name}-{dim}")
        for op in REGISTRY.values()
        for name, value in op.make_inputs(torch.float16, CPU).items()
        if isinstance(value, Tensor) and name not in SMALL and (op.name, name) not in DENSE
        for dim in range(value.dim() - 1)
        if value.shape[dim] > 1 and (name, dim) not in SMALL
    ]


@pytest.fixture(autouse=True)
def nothing_is_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a launch the interpreter copies whole storages to where they came from: those of a CPU to themselves."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)


def results(op: KernelOp, inputs: dict[str, Any]) -> list[Any]:
    output = op.launch(**inputs)
    output = list(output) if isinstance(output, tuple) else [output]
    return output + [inputs[name] for name in sorted(op.mutates)]


@cache
def expected_results(name: str) -> list[Any]:
    """Those over contiguous tensors, which all tensors of an op are compared with."""
    return results(REGISTRY[name], REGISTRY[name].make_inputs(torch.float16, CPU))


@pytest.mark.parametrize(("op", "name", "dim"), cases())
def test_rows_past_two_to_the_31_elements(op: KernelOp, name: str, dim: int) -> None:
    spread = op.make_inputs(torch.float16, CPU)
    spread[name] = spread_out(spread[name], dim)
    for ours, expected in zip(results(op, spread), expected_results(op.name), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["paged_attention", "paged_decode_attention"])
def test_outputs_past_two_to_the_31_elements(name: str, dim: int) -> None:
    """Attention writes where it is told, however far apart rows and heads are."""
    inputs = REGISTRY[name].make_inputs(torch.float16, CPU)
    (expected,) = expected_results(name)
    output = spread_out(torch.zeros_like(expected), dim)
    REGISTRY[name].launch(**inputs, output=output)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
