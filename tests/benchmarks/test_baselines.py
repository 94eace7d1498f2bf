"""The baselines' figures on a tiny model: what must hold whatever the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.analysis.batching import compare_batching
from benchmarks.baselines import main

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,40,9
2023-11-16 18:15:50.9951690,5000,2
2023-11-16 18:15:51.2224670,1,30
2023-11-16 18:15:51.4225180,17,4
2023-11-16 18:15:52.4225180,16,900
2023-11-16 18:15:53.4225180,99,1
"""


def test_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, output = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text(TRACE, encoding="utf-8")
    options = ["--model", "dummy:tiny", "--set", "model.device=cpu", "--set", "scheduler.max_num_batched_tokens=512"]
    options += ["--set", "cache.num_blocks=100", "--set", "cache.block_size=16"]
    options += [
        "--slots",
        "2",
        "--repeats",
        "1",
        "--requests",
        "5",
        "--max-prompt-len",
        "100",
        "--max-output-len",
        "24",
    ]
    options += ["--max-model-len", "256", "--system-len", "200", "--answer-len", "40"]
    main(["--trace", str(trace), "-o", str(output), *options])
    result = json.loads(output.read_text(encoding="utf-8"))
    batching, outputs = result["batching"], [9, 2, 24, 4, 24]
    expected = compare_batching(outputs, 2)
    assert (batching["requests"], batching["output_tokens"]) == (5, sum(outputs))
    for name in ("continuous", "static"):
        # Prompts fit one step beside everything else, so a request takes as many steps as it has output tokens.
        schedule = getattr(expected, name)
        assert batching[name]["steps"] == schedule.num_steps
        assert batching[name]["idle_slot_share"] == pytest.approx(1 - sum(outputs) / (2 * schedule.num_steps))
        assert batching[name]["idle_slot_share_closed_form"] == pytest.approx(batching[name]["idle_slot_share"])
    waste = result["waste"]
    for layout in ("paged", "contiguous"):
        parts = waste[layout]["last_blocks_share"] + waste[layout]["reserved_share"]
        assert waste[layout]["wasted_share"] == pytest.approx(parts)
        assert waste[layout]["most_requests_at_once"] == 5
    assert waste["paged"]["reserved_share"] == 0
    # Six reservations of 16 blocks fit, and 4 blocks are left.
    assert (waste["paged"]["external_share"], waste["contiguous"]["external_share"]) == (0, pytest.approx(0.04))
    # 256 slots for each: of those, at most 124 ever hold a token.
    assert waste["contiguous"]["wasted_share"] > 132 / 256
    assert len(result["prefix"]["ttft_s"]["warm"]) == 3
    assert len(result["no_cache"]["none"]) == 8


def test_a_kind_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", "x.csv", "--only", "batching,speed"])
    assert "not speed" in capsys.readouterr().err
