"""What the interpreter lets pass and a compiler does not: the kernels compile for a GPU, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ops import paged_attention, rms_norm, store_kv_cache

INTEGERS = {"block_table_ptr": "*i32", "query_start_loc_ptr": "*i32", "seq_lens_ptr": "*i32", "slot_mapping_ptr": "*i64"}


def shared_bytes(kernel, constants):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = INTEGERS.get(name, "*bf16")
        else:
            signature[name] = "fp32" if name in ("eps", "scale") else "i32"
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    assert ".target sm_90" in compiled.asm["ptx"]
    return compiled.metadata.shared


assert shared_bytes(rms_norm._rms_norm_kernel, {"HIDDEN": 576, "BLOCK": 1024}) < 1024
sizes = {"BLOCK_SIZE": 24, "NUM_KV_HEADS": 3, "HEAD_DIM": 80, "BLOCK": 256}
assert shared_bytes(store_kv_cache._store_kv_cache_kernel, sizes) == 0
for num_tokens, head_dim, window in ((8, 80, None), (512, 64, 1000), (512, 256, None)):
    tiles = paged_attention.tile_sizes(num_tokens, 8, 3, head_dim, 2)
    constants = {"GROUP": 3, "HEAD_DIM": head_dim, "BLOCK_SIZE": 24, "WINDOW": window}
    constants |= {name.upper(): size for name, size in tiles._asdict().items()}
    # What a consumer card gives one program.
    assert shared_bytes(paged_attention._paged_attention_kernel, constants) <= 99 * 1024
print("compiled")
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout) == (0, "compiled\n"), result.stderr
