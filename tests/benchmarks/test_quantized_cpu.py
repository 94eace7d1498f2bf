"""The benchmark of quantized weights on a CPU, on a model of random weights."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.support import has_cpu_kernels

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(not has_cpu_kernels(), reason="needs an x86-64 CPU with AVX2, and llvmlite")
def test_a_run_says_what_each_method_takes_and_how_fast_it_is(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = "--model dummy:tiny --threads 1 --requests 1 3 --prompt-len 20 --output-len 4 --repeats 1"
    command = [sys.executable, "-m", "benchmarks.quantized_cpu", *shlex.split(sizes), "-o", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(output.read_text())["by_threads"]["1"]
    engine, products = measured["engine"], measured["products_ms"]
    dense = engine["float32"]
    assert set(engine) - {"float32"} == {
        "int8",
        "w8a8_int8",
        "w8a8_int8, head int8",
        "int4",
        "int4, head int8",
    }
    for name, row in engine.items():
        assert row["emulated_quantization"] is False
        assert name == "float32" or row["weights_bytes"] < dense["weights_bytes"]
        for rate in ("decode_1_tok_s", "decode_3_tok_s", "prefill_tok_s"):
            assert row[rate]["median"] > 0
            assert row[rate]["over_float32"]["median"] == pytest.approx(row[rate]["median"] / dense[rate]["median"])
    assert set(products) == {"float32", "int8", "w8a8_int8", "int4"}
    assert all(set(rows) == {"1", "2", "4", "8", "16", "64", "256"} for rows in products.values())
    assert str(tmp_path) not in output.read_text(), "no path of the machine"
