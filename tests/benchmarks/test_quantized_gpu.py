"""The benchmark of quantized weights on a card: a run of a tiny model on the CPU, and its table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.models.dummy import DUMMY_SHAPES
from benchmarks import quantized_gpu
from benchmarks.aims import LARGE, missed_quantized
from benchmarks.figures import Figure, peer_share
from benchmarks.quantized_table import markdown, text_table
from kernels.cpu.support import has_cpu_kernels

TINY = DUMMY_SHAPES["tiny"]
SIZES = "--model dummy:tiny --repeats 2 --input-len 8 --output-len 4 --decode-batches 1,2 --prefill 2x16"


def test_a_run_measures_each_variant_beside_the_model_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    variants = "--variant int8 --variant fp8 --variant int4:group_size=7"
    quantized_gpu.main([*SIZES.split(), *variants.split(), "-o", str(path)])
    result = json.loads(path.read_text())
    rows = {row["variant"]: row for row in result["results"]}
    assert list(rows) == ["reference", "int8", "fp8", "int4:group_size=7"]
    reference = {figure["name"]: figure for figure in rows["reference"]["figures"]}
    assert list(reference) == ["decode 1", "decode 2", "prefill 2x16"]
    assert all(len(figure["samples"]) == 2 and figure["ratio"] is None for figure in reference.values())
    embedding = 0 if TINY.tie_word_embeddings else 4 * TINY.vocab_size * TINY.hidden_size
    assert rows["reference"]["floor_bytes"] == 4 * TINY.count_parameters() - embedding
    step_s = 2 / reference["decode 2"]["median"]
    copy_s = rows["reference"]["floor_bytes"] / result["limits"]["copy_bytes_per_s"]
    assert reference["decode 2"]["share"] == pytest.approx(copy_s / step_s)
    assert rows["fp8"]["emulated_quantization"], "a CPU has no such kernel"
    assert rows["fp8"]["figures"] == []
    assert "group_size" in rows["int4:group_size=7"]["error"]
    assert rows["int8"]["floor_bytes"] < rows["reference"]["floor_bytes"]
    if has_cpu_kernels():
        for figure in rows["int8"]["figures"]:
            assert figure["ratio"] == figure["median"] / reference[figure["name"]]["median"]
    shown = capsys.readouterr().out
    assert "emulated" in shown
    assert rows["int4:group_size=7"]["error"] in shown


def test_no_variant_begins_when_the_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    quantized_gpu.main([*SIZES.split(), "--variant", "int8", "--seconds", "0", "-o", str(path)])
    assert [row["error"] for row in json.loads(path.read_text())["results"]] == ["left out: 0 s were over"] * 2


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantized_gpu.main(["--variant", "int5"])
    assert "there is no method 'int5'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("method", [None, "int8", "int4", "nf4", "fp8", "w8a8_int8"])
def test_the_card_holds_the_bytes_that_are_reported(method: str | None) -> None:
    settings = {"model.name": "dummy:smollm2-135m", "quantization.method": method, "kernels.enforce_eager": True}
    host = EngineHost()
    try:
        with quantized_gpu.weights_on_card() as held:
            info = host.load(EngineConfig().with_overrides(settings | {"cache.num_blocks": 64}))
        assert held == [pytest.approx(info.load["weights_bytes"], rel=0.02)]
    finally:
        host.close()
        torch.cuda.empty_cache()


def stored() -> dict[str, Any]:
    def row(variant: str, num_bytes: int, rates: dict[str, float], held: int | None = None) -> dict[str, Any]:
        figures = [
            Figure.of(
                variant,
                name,
                "tok/s",
                [rate],
                peer=None if variant == "reference" else bf16[name],
                share=num_bytes * rate / 4e12 if name == "decode 1" else None,
                limit="copy",
            )
            for name, rate in rates.items()
        ]
        return {
            "variant": variant,
            "dtype": "bfloat16",
            "weights_bytes": num_bytes,
            "floor_bytes": num_bytes,
            "emulated_quantization": False,
            "device_weights_bytes": held or num_bytes,
            "figures": [asdict(figure) for figure in figures],
            "over_peer": [],
        }

    bf16 = {"decode 1": 200.0, "prefill 8x1024": 40_000.0}
    fp8 = row("fp8", 8_000_000_000, {"decode 1": 350.0, "prefill 8x1024": 52_000.0})
    ratio = 350.0 / 400.0
    fp8["over_peer"] = [
        fp8["figures"][0]
        | {
            "peer": 400.0,
            "peer_name": "vLLM",
            "ratio": ratio,
            "peer_share": peer_share(fp8["figures"][0]["share"], ratio),
        }
    ]
    int4 = "int4:group_size=128,zero_point=none"
    return {
        "model": LARGE,
        "peer": "vLLM",
        "card": "Card",
        "driver": "570.1",
        "date": "2026-12-01",
        "commit": "0123456789",
        "limits": {"copy_bytes_per_s": 4.0e12, "matmul_flops_per_s": 7.0e14},
        "environment": {"versions": {"torch": "2.11", "triton": "3.6"}},
        "options": {"decode_batches": [1], "prefill": [[8, 1024]]},
        "results": [
            row("reference", 16_000_000_000, bf16),
            row(int4, 5_000_000_000, {"decode 1": 490.0, "prefill 8x1024": 40_000.0}, 5_150_000_000),
            fp8,
            {"variant": "nf4", "error": "left out: 150 s were over", "figures": []},
        ],
    }


def test_a_stored_result_becomes_a_table_that_names_what_falls_short() -> None:
    result = stored()
    lines = markdown([result]).splitlines()
    assert lines[2:8] == [
        f"| {LARGE}: weights | layers and head | decode 1, tok/s | prefill 8x1024, tok/s | on the card |",
        "|---|---:|---:|---:|---:|",
        "| bfloat16 | 16.00 GB | 200, 80% | 40,000 | 1.000 of 16.00 GB |",
        "| int4 g128 symmetric | 5.00 GB | 490, 2.45 ×, 61% | 40,000, 1.00 × | 1.030 of 5.00 GB |",
        "| fp8 | 8.00 GB | 350, 1.75 ×, 70% | 52,000, 1.30 × | 1.000 of 8.00 GB |",
        "| nf4 | – | – | – | – |",
    ]
    assert "Beside vLLM: fp8 decode 1 0.88 × (350 against 400 tok/s, 70% and 80% of the limit)." in lines
    assert missed_quantized(result) == [
        "decode 1 of int4 g128 symmetric, 61.3% of its limit instead of 68%",
        "weights of int4 g128 symmetric, 5,150,000,000 bytes on the card where 5,000,000,000 are reported",
        "prefill 8x1024 of fp8, 1.300 × instead of 1.40 ×",
        "decode 1 of fp8, 70.0% of its limit instead of 78%",
        "decode 1 of fp8, 0.875 × vLLM instead of 1.00 ×",
    ]
    assert lines[-1] == f"Short of what it aims at: {'; '.join(missed_quantized(result))}."
    assert "left out: 150 s were over" in text_table(result)
