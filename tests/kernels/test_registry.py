from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.kernel_op import KernelOp
from kernels.registry import REGISTRY
from kernels.specs import paged_attention, rms_norm, store_kv_cache
from tests.kernels.oracle import KERNEL_DTYPES

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")


def cloned(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def test_every_op_file_is_registered() -> None:
    ops = {path.stem for path in (ROOT / "kernels/ops").glob("*.py")} - {"__init__", "checks"}
    assert set(REGISTRY) == ops
    assert all(name == op.name == op.launch.__name__ == op.reference.__name__ for name, op in REGISTRY.items())


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_launch_agrees_with_reference(op: KernelOp, dtype: torch.dtype, device: torch.device) -> None:
    """Results, and all inputs after the call: what one mutates the other does, and nothing else."""
    inputs = op.make_inputs(dtype, device)
    launched, referred = cloned(inputs), cloned(inputs)
    outputs = op.launch(**launched), op.reference(**referred)
    tolerance = op.tolerances[dtype]
    torch.testing.assert_close(*outputs, atol=tolerance.atol, rtol=tolerance.rtol)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(launched[name], referred[name])
    changed = {n for n, v in inputs.items() if isinstance(v, torch.Tensor) and not torch.equal(v, referred[n])}
    assert changed == op.mutates


@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_inputs_depend_on_the_seed_alone(op: KernelOp) -> None:
    def floats(seed: int) -> torch.Tensor:
        inputs = op.make_inputs(torch.float32, CPU, seed)
        return torch.cat(
            [t.flatten() for t in inputs.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        )

    assert torch.equal(floats(1), floats(1))
    assert not torch.equal(floats(1), floats(2))


def test_bytes_and_flops_of_attention() -> None:
    inputs = paged_attention.make_inputs(
        torch.float16, CPU, query_lens=[1, 3, 0], seq_lens=[20, 3, 9], num_heads=4, num_kv_heads=2, head_dim=8
    )
    keys = 20 + 3  # the request without rows reads none
    assert paged_attention.bytes_moved(inputs) == (
        2 * 4 * (4 * 8) * 2  # four rows in and out
        + keys * 2 * (2 * 8) * 2
        + 4 * (2 + 1)  # block ids
        + 4 * (4 + 3)  # query_start_loc, seq_lens
    )
    assert paged_attention.flops(inputs) == 4 * (20 + 1 + 2 + 3) * 4 * 8
    windowed = inputs | {"window": 2}
    assert paged_attention.bytes_moved(inputs) - paged_attention.bytes_moved(windowed) == 18 * 2 * (2 * 8) * 2 + 4 * 1
    assert paged_attention.flops(windowed) == 4 * (2 + 1 + 2 + 2) * 4 * 8


def test_bytes_of_the_memory_bound_ops() -> None:
    assert (
        rms_norm.bytes_moved(REGISTRY["rms_norm"].make_inputs(torch.float16, CPU, num_tokens=4, hidden=10))
        == 2 * 80 + 20
    )
    stored = REGISTRY["store_kv_cache"].make_inputs(torch.float32, CPU, num_tokens=4, num_kv_heads=2, head_dim=8)
    assert store_kv_cache.bytes_moved(stored) == 2 * 2 * (4 * 2 * 8 * 4) + 4 * 8


def test_references_and_registry_need_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kernels.registry import REGISTRY\n"
        "for op in REGISTRY.values(): op.reference(**op.make_inputs(torch.float32, torch.device('cpu')))\n"
        "import kernels.benchmark, kernels.reference.rotary_embedding, kernels.reference.silu_and_mul\n"
        "try: op.launch\n"
        "except ImportError: print('refused')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "refused\n"), result.stderr
