"""The benchmark of KV dtypes, on a model of random weights."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_run_says_what_each_kv_dtype_holds_costs_and_takes(tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    sizes = "--lengths 129 200 --threads 1 --requests 2 --prompt-len 20 --output-len 4 --repeats 1 --device cpu"
    command = [
        sys.executable,
        "-m",
        "benchmarks.kv_dtypes",
        str(text),
        "--model",
        "dummy:tiny",
        "-o",
        str(output),
        *shlex.split(sizes),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(output.read_text())
    assert list(measured["capacity"]) == list(measured["output_tok_s"]) == ["auto", "fp8_e4m3", "int8", "int4"]
    for capacity in measured["capacity"].values():
        assert capacity["bytes_per_token"] == capacity["kv_bytes_per_token"]
        assert capacity["kv_cache_bytes"] == (capacity["num_blocks"] + 1) * 16 * capacity["bytes_per_token"]
    assert [row["num_tokens"] for row in measured["divergence"]["int4"]] == [129, 200]
    assert measured["divergence"]["int4"][1]["mean"] > measured["divergence"]["int8"][1]["mean"] > 0
    assert all(rate["median"] > 0 for rate in measured["output_tok_s"].values())
    assert str(tmp_path) not in output.read_text(), "no path of the machine"
