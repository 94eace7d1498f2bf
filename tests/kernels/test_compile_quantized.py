"""What the interpreter lets pass and a compiler does not: products with 8-bit weights and NormalFloat4 compile for a GPU.

So does what only a GPU runs: conversions and lookups in PTX, and tiles that come through the copy engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ops import (
    byte_gated_linear,
    byte_linear,
    byte_projection,
    byte_qkv_rotary_store,
    int_linear,
    nf4_dequantize,
    nf4_gated_linear,
    nf4_linear,
    nf4_projection,
    nf4_qkv_rotary_store,
    quantize_tokens,
    rms_norm_quantize,
    silu_and_mul,
    silu_and_mul_quantize,
)

HEADS = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 80, "BLOCK_SIZE": 24}
TYPES = {
    "*i32": "words tables counters largest",
    "*i64": "positions slot_mapping",
    "*fp32": "scales x_scales partial cos_sin_cache",
    "*bf16": "steps means",
}
POINTERS = {f"{name}_ptr": kind for kind, names in TYPES.items() for name in names.split()}
ALIGNED = ("stride_x_token", "stride_words_row", "stride_codes_row", "num_columns")
CONSUMER_SHARED_BYTES = 99 * 1024  # what a consumer card gives one program
EVERY_CASE = sys.argv[1:] == ["every case"]


def compiled(kernel, constants, num_warps=4, num_stages=1, without=(), **pointers):
    # Terms that are left out, and pointers of another dtype than the model's.
    constants = {"BIAS": True, "RESIDUAL": True, "PDL": True} | constants | dict.fromkeys(without, None)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name) or POINTERS.get(name, "*bf16")
            if signature[name].startswith("*"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
            if name in ALIGNED:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    pdl = constants.get("PDL", False)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert result.metadata.shared <= CONSUMER_SHARED_BYTES, (kernel, constants, result.metadata.shared)
    # A kernel that may start early has to wait before it reads what the one before it writes.
    assert ("griddepcontrol.wait" in result.asm["ptx"]) == pdl
    return result.asm["ptx"]


for kind, per_token, parts in (("*i8", True, 1), ("*u8", True, 4), ("*u8", False, 1)):
    sizes = {"COLUMNS": 576, "BLOCK": 1024, "PARTS": parts, "PER_TOKEN": per_token, "HARDWARE": True, "PDL": per_token}
    compiled(quantize_tokens._quantize_tokens_kernel, sizes, without=("largest_ptr",) * per_token, codes_ptr=kind)
for kind in ("*i8", "*u8"):
    sizes = {"HIDDEN": 4096, "INTERMEDIATE": 4096, "BLOCK": 4096, "HARDWARE": kind == "*u8"}
    for kernel in (rms_norm_quantize._rms_norm_quantize_kernel, silu_and_mul_quantize._silu_and_mul_quantize_kernel):
        ptx = compiled(kernel, sizes, 8, codes_ptr=kind)
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (kind == "*u8")
compiled(silu_and_mul._silu_and_mul_kernel, {"INTERMEDIATE": 576, "BLOCK": 512})
compiled(quantize_tokens._largest_kernel, {"COLUMNS": 576, "BLOCK": 1024})

for kind, product in (("fp8e4nv", "f32.f16.f16.f32"), ("i8", "s32.s8.s8.s32")):
    # A kind is a dtype to these kernels: each cut of one of them will do, unless every case is asked for.
    for block_m, block_n, even in ((1, 16, True), (16, 32, False)):
        if even == (kind == "i8") and not EVERY_CASE:
            continue
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SHARES": 4, "EVEN": even, "AHEAD": 2, "ONCE": even, "ASM": True}
        ptx = compiled(byte_projection.few_tokens_kernel, sizes, x_ptr=f"*{kind}")
        assert product in ptx
        for kernel in (byte_gated_linear._byte_gated_linear_kernel, byte_qkv_rotary_store._byte_qkv_rotary_store_kernel):
            assert product in compiled(kernel, HEADS | sizes, x_ptr=f"*{kind}")
    for tma, splits, block_m, block_n, num_warps, num_stages in ((True, 1, 128, 128, 8, 3), (False, 2, 32, 64, 4, 4)):
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 128, "TMA": tma, "SPLITS": splits}
        sizes |= {"AHEAD": 384 if tma else 0}
        sizes |= {"INT8": kind == "i8", "EVEN_K": tma}
        boxes = {"x_ptr": f"tensordesc<{kind}[{block_m},128]>", "codes_ptr": f"tensordesc<{kind}[{block_n},128]>"}
        pointers = boxes if tma else {"x_ptr": f"*{kind}", "codes_ptr": f"*{kind}"}
        pointers["rows_ptr"] = f"*{kind}"
        pointers["partial_ptr"] = "*i32" if kind == "i8" else "*fp32"
        ptx = compiled(byte_linear.many_tokens_kernel, sizes, num_warps, num_stages, **pointers)
        assert "wgmma" in ptx
        assert ("cp.async.bulk.tensor" in ptx) == tma
        assert ("cp.async.bulk.prefetch.L2" in ptx) == tma

# Codes of 8 bits with nothing but scales: of two chunks, sixteen steps of one product each, and two codes at a time made for it.
for group, kind in ((0, "bf16"), (32, "fp16")):
    sizes = {"BITS": 8, "ORIGIN": "none", "GROUP": group, "BLOCK_M": 1, "BLOCK_N": 16, "SHARES": 4, "EVEN": True}
    sizes |= {"AHEAD": 2, "ONCE": True}
    ptx = compiled(int_linear._few_tokens_kernel, sizes, without=("origins_ptr",), x_ptr=f"*{kind}")
    kind = kind.replace("fp", "f")
    assert (ptx.count("mma.sync"), ptx.count(f"fma.rn.{kind}x2")) == (16, 64)
    assert f"fma.rn.{kind} " not in ptx and f"fma.rn.{kind}\t" not in ptx

scaled = {"LEVEL_SCALE": 1.0, "ASM": True}
for block_m, block, even, kind in ((1, 64, True, "bf16"), (8, 128, False, "fp16")):
    sizes = scaled | {"BLOCK_M": block_m, "BLOCK_N": 16, "SHARES": 4, "AHEAD": 2, "ONCE": even, "BLOCK": block, "EVEN": even}
    floats = dict.fromkeys(("output_ptr", "x_ptr", "levels_ptr", "bias_ptr", "residual_ptr"), f"*{kind}")
    ptx = compiled(nf4_projection.few_tokens_kernel, sizes, codes_ptr="*i8", **floats)
    assert f"f32.{kind.replace('fp', 'f')}" in ptx
    assert "prmt.b32 low" in ptx
    floats |= dict.fromkeys(("query_ptr", "key_cache_ptr", "value_cache_ptr"), f"*{kind}")
    gated, qkv = nf4_gated_linear._nf4_gated_linear_kernel, nf4_qkv_rotary_store._nf4_qkv_rotary_store_kernel
    for kernel in (gated, qkv) if EVERY_CASE else (qkv,) if even else (gated,):  # what both share is in each cut
        assert "prmt.b32 low" in compiled(kernel, HEADS | sizes, codes_ptr="*i8", **floats)
sizes = scaled | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK": 64, "EVEN_K": True, "SPLITS": 4}
compiled(nf4_linear._many_tokens_kernel, sizes, num_stages=3, codes_ptr="*i8")
sizes = {"BLOCK": 64, "BLOCK_N": 8}
compiled(nf4_dequantize._dequantize_kernel, sizes, codes_ptr="*i8", levels_ptr="*fp32")
print("compiled")
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Each of them, on each of its paths, up to the assembler: it reads all of their PTX, but improves none of it."""
    compile_all(tmp_path, DISABLE_PTXAS_OPT="1")


@pytest.mark.slow
def test_every_case_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Also both products with both kinds of codes in every cut."""
    compile_all(tmp_path, "every case")


def compile_all(folder: Path, *arguments: str, **environment: str) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment |= {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout) == (0, "compiled\n"), result.stderr
