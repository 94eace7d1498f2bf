from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.kernel_op import KernelOp
from kernels.registry import REGISTRY
from kernels.specs import (
    decode_positions,
    draft_positions,
    embed_tokens,
    greedy_tokens,
    norm_embedding_and_features,
    norm_gated_linear,
    norm_linear,
    norm_qkv_rotary_store,
    paged_attention,
    paged_decode_attention,
    record_tokens,
    rms_norm,
    store_kv_cache,
)
from tests.kernels.oracle import KERNEL_DTYPES

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")


def cloned(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def is_op(path: Path) -> bool:
    """A file with a function of its own name; the others hold what ops share."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return path.stem in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_op_file_is_registered() -> None:
    ops = {path.stem for path in (ROOT / "kernels/ops").glob("*.py") if is_op(path)}
    assert set(REGISTRY) == ops
    assert "projection" not in ops
    assert all(name == op.name == op.launch.__name__ == op.reference.__name__ for name, op in REGISTRY.items())


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_launch_agrees_with_reference(op: KernelOp, dtype: torch.dtype, device: torch.device) -> None:
    """Results, and all inputs after the call: what one mutates the other does, and nothing else."""
    inputs = op.make_inputs(dtype, device)
    launched, referred = cloned(inputs), cloned(inputs)
    outputs = op.launch(**launched), op.reference(**referred)
    tolerance = op.tolerances[dtype]
    torch.testing.assert_close(*map(op.comparable, outputs), atol=tolerance.atol, rtol=tolerance.rtol)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            bounds = {"atol": tolerance.atol, "rtol": tolerance.rtol} if name in op.mutates else {"atol": 0, "rtol": 0}
            torch.testing.assert_close(launched[name], referred[name], **bounds)
    changed = {n for n, v in inputs.items() if isinstance(v, torch.Tensor) and not torch.equal(v, referred[n])}
    assert changed == op.mutates


@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_inputs_depend_on_the_seed_alone(op: KernelOp) -> None:
    def values(seed: int) -> torch.Tensor:
        inputs = op.make_inputs(torch.float32, CPU, seed)
        return torch.cat([t.flatten().double() for t in inputs.values() if isinstance(t, torch.Tensor)])

    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))


@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_launcher_and_reference_take_the_same_arguments(op: KernelOp) -> None:
    """But for those by keyword only, which say how to launch. Inputs name every one of them."""
    launch, reference = (dict(inspect.signature(function).parameters) for function in (op.launch, op.reference))
    common = {name: value for name, value in launch.items() if value.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert [(name, value.default) for name, value in common.items()] == [
        (name, value.default) for name, value in reference.items()
    ]
    assert set(op.make_inputs(torch.float32, CPU)) == set(common)


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


def test_bytes_and_flops_of_decode_attention_are_those_of_attention() -> None:
    """But for the row starts, which it does not take."""
    sizes: dict[str, Any] = {"seq_lens": [20, 3, 40], "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    for window in (None, 1, 17, 100):
        inputs = paged_decode_attention.make_inputs(torch.float16, CPU, window=window, **sizes)
        general = paged_attention.make_inputs(torch.float16, CPU, query_lens=[1] * 3, window=window, **sizes)
        assert paged_decode_attention.bytes_moved(inputs) == paged_attention.bytes_moved(general) - 4 * 4
        assert paged_decode_attention.flops(inputs) == paged_attention.flops(general)


def test_bytes_and_flops_of_the_linear_ops() -> None:
    linear = {"num_tokens": 3, "num_columns": 10, "num_parts": 2}
    into = 3 * 10 * 2 + 4 * 3 * 2  # x, sums of squares
    inputs = norm_linear.make_inputs(torch.float16, CPU, num_rows=8, **linear)
    weight, bias, rows = 8 * 10 * 2, 8 * 2, 3 * 8 * 2
    # Residual in, output and scaled output out, the next norm's weight in and its sums out.
    assert norm_linear.bytes_moved(inputs) == into + weight + bias + 3 * rows + 8 * 2 + 4 * 3
    plain = {"num_parts": 0, "bias": False, "residual": False, "next_norm": False, "out_dtype": torch.float32}
    inputs = norm_linear.make_inputs(torch.float16, CPU, num_rows=8, **linear | plain)
    assert norm_linear.bytes_moved(inputs) == 3 * 10 * 2 + weight + 3 * 8 * 4
    assert norm_linear.OP.flops(inputs) == 2 * 3 * 8 * 10

    inputs = norm_gated_linear.make_inputs(torch.float16, CPU, intermediate=4, **linear)
    assert norm_gated_linear.bytes_moved(inputs) == into + weight + bias + rows // 2
    assert norm_gated_linear.OP.flops(inputs) == 2 * 3 * 8 * 10

    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
    inputs = norm_qkv_rotary_store.make_inputs(torch.float16, CPU, **linear | heads)
    assert norm_qkv_rotary_store.bytes_moved(inputs) == into + weight + bias + rows + 3 * (4 * 2 + 8 + 8)
    assert norm_qkv_rotary_store.OP.flops(inputs) == 2 * 3 * 8 * 10


def test_bytes_of_embedding_and_recording_tokens() -> None:
    inputs = embed_tokens.make_inputs(torch.float16, CPU, num_tokens=4, hidden=10, next_norm=False)
    inputs["token_ids"] = torch.tensor([5, -1, 5, 6])
    inputs["sampled_token_ids"][inputs["rows"][1]] = 6
    ids = 4 * 8 + 8 + 8  # one is looked up by way of its row
    assert embed_tokens.bytes_moved(inputs) == ids + (2 + 4) * 20
    normed = inputs | {"next_norm_weight": torch.ones(10).half()}
    assert embed_tokens.bytes_moved(normed) == ids + (2 + 4) * 20 + 20 + 4 * 20 + 4 * 4
    assert (embed_tokens.flops(inputs), embed_tokens.flops(normed)) == (0, 3 * 4 * 10)
    recorded = record_tokens.make_inputs(torch.float16, CPU, num_sampled=4)
    assert record_tokens.bytes_moved(recorded) == 4 * (8 + 8 + 1) + 4 * (8 + 8) + 4 * (4 + 4)
    assert record_tokens.bytes_moved(recorded | {"seq_lens": None}) == 4 * (8 + 8 + 1) + 4 * (8 + 8)
    assert decode_positions.bytes_moved(decode_positions.make_inputs(torch.float16, CPU)) == 7 * (4 + 4 + 8 + 8)


def test_bytes_of_what_an_eagle_head_drafts_with() -> None:
    inputs = norm_embedding_and_features.make_inputs(torch.float16, CPU, num_tokens=4, hidden=10)
    inputs["token_ids"] = torch.tensor([5, 8, 5, 6])
    ids, embeddings, features, weights = 4 * 8, 3 * 20, 4 * 20, 2 * 20
    assert norm_embedding_and_features.bytes_moved(inputs) == ids + embeddings + features + weights + 4 * 40
    assert norm_embedding_and_features.flops(inputs) == 2 * 4 * 4 * 10
    requests, tokens = 7 * (8 + 8 + 8 + 4), 4 * 7 * (4 + 8)
    inputs = draft_positions.make_inputs(torch.float16, CPU)
    assert draft_positions.bytes_moved(inputs) == requests + tokens + 2 * 4 * 7 * (4 + 8)
    inputs = greedy_tokens.make_inputs(torch.float16, CPU, num_rows=3, vocab_size=10)
    assert greedy_tokens.bytes_moved(inputs) == 3 * (40 + 8 + 1)
    inputs = greedy_tokens.make_inputs(torch.float16, CPU, num_rows=3, vocab_size=10, is_draft=True)
    assert greedy_tokens.bytes_moved(inputs) == 3 * (40 + 8 + 8 + 1)


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
