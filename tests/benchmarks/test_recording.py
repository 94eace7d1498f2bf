"""The benchmark of recording: a tiny model on the CPU, and the table."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recording, recording_table
from benchmarks.recording import main, parse

SIZES = ["--model", "dummy:tiny", "--requests", "2", "--output-len", "24", "--repeats", "1"]


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [([], "without the ledger"), (["--speculation"], "without the ledger of speculation")],
)
def test_a_run_with_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], left_out: str
) -> None:
    """Each variant has that ledger which it says, or the benchmark would have ended; greedy texts of a dummy go in circles."""
    main([*SIZES, *arguments, "-o", str(tmp_path / "result.json")])
    (result,) = recording_table.load_results(tmp_path)
    assert list(result["duration_s"]) == ["recorded", left_out, "not recorded"]
    medians = {name: of["median"] for name, of in result["duration_s"].items()}
    assert result["ledger_overhead"] == pytest.approx(medians["recorded"] / medians[left_out] - 1)
    assert result["overhead"] == pytest.approx(medians["recorded"] / medians["not recorded"] - 1)
    assert result["step_ms"] == pytest.approx(medians["not recorded"] / result["steps"] * 1e3)
    if arguments:
        # Of each request's 24 tokens the first is the prompt's; the others come one a step, or several out of a round.
        assert result["speculation"] == "ngram"
        assert 0 < result["rounds"] <= 2 * 23
        assert result["steps"] < 24
    else:
        assert (result["speculation"], result["rounds"], result["steps"]) == (None, None, 24)
    assert left_out in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "name"), [([], "without_ledger"), (["--speculation"], "without_speculation_ledger")]
)
def test_a_ledger_that_is_not_left_out_is_no_result(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    monkeypatch.setattr(recording, name, nullcontext)
    with pytest.raises(SystemExit, match=r"a run without the ledger.* has a ledger"):
        main([*SIZES, *arguments])


def test_a_proposer_that_never_drafts_is_no_result() -> None:
    """One token behind the prompt's own needs no draft."""
    with pytest.raises(SystemExit, match="a run recorded has no ledger: speculation"):
        main([*SIZES, "--speculation", "ngram", "--output-len", "1"])


def test_so_many_requests_at_a_time(tmp_path: Path) -> None:
    """Two after two: of 24 tokens each, a step for each token of one of a pair, and some in which only one of a pair is left."""
    main([*SIZES, "--requests", "4", "--concurrency", "2", "-o", str(tmp_path / "result.json")])
    (result,) = recording_table.load_results(tmp_path)
    assert result["concurrency"] == 2
    assert 2 * 24 <= result["steps"] < 4 * 24
    assert "4 requests of 24 tokens, 2 at a time, " in recording_table.text_table(result)


def test_where_a_card_speculates_runs_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card has made 512 tokens with n-grams in 35 ms: that is 4 s and more of these, where chance is of some milliseconds."""
    sizes = ("requests", "output_len", "concurrency", "repeats")

    def sizes_of(*arguments: str) -> dict[str, Any]:
        return {name: getattr(parse(arguments), name) for name in sizes}

    short = {"requests": 16, "output_len": 32, "concurrency": None, "repeats": 5}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("backend.worker.device.choose_device", lambda config, device=device: device)
        assert sizes_of() == short
        long = sizes_of("--speculation")
        assert (long == short) == (device == "cpu")
        own = sizes_of("--speculation", "eagle", "--requests", "3", "--output-len", "4")
        assert own == long | {"requests": 3, "output_len": 4}
    assert long["requests"] * long["output_len"] * 0.035 / 512 > 4
    assert long["concurrency"] == 16
    assert long["repeats"] > short["repeats"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculation", "medusa"], "'medusa'"),
        (["--head", "somewhere"], "--head belongs to --speculation eagle"),
        (["--repeats", "0"], "--repeats must be 1 or more"),
    ],
)
def test_what_cannot_be_measured(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def stored(recorded: float) -> dict[str, Any]:
    seconds = {"recorded": recorded, "without the ledger of speculation": 2.0, "not recorded": 1.6}
    return {
        "benchmark": "recording",
        "date": "2026-11-28",
        "model": "m",
        "speculation": "eagle",
        "requests": 16,
        "output_len": 32,
        "steps": 1200,
        "rounds": 3400,
        "duration_s": {
            name: {"median": value, "min": value - 0.5, "max": value + 1} for name, value in seconds.items()
        },
        "step_ms": 1.333,
        "overhead": recorded / 1.6 - 1,
        "ledger_overhead": recorded / 2.0 - 1,
        "environment": {"gpu": "NVIDIA H200", "cpu": "c"},
    }


def test_the_table_says_what_each_part_of_recording_costs(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(stored(2.03)))
    (tmp_path / "b.json").write_text(json.dumps({"date": "2026-01-01", "duration_s": {}}))  # an older one
    lines = recording_table.markdown(recording_table.load_results(tmp_path)).splitlines()
    assert lines == [
        "**Recording m: 16 requests of 32 tokens, 1,200 steps of 1.33 ms, 3,400 rounds of eagle, NVIDIA H200, "
        "2026-11-28**",
        "",
        "| run | median | min..max | recording beside it |",
        "|---|---:|---:|---:|",
        "| recorded | 2.030 s | 1.530..3.030 | – |",
        "| without the ledger of speculation | 2.000 s | 1.500..3.000 | +1.5% |",
        "| not recorded | 1.600 s | 1.100..2.600 | +26.9% |",
    ]
    short = "Short of what it aims at: the ledger of eagle, 2.5% of the time instead of 2%."
    assert recording_table.markdown([stored(2.05)]).splitlines()[-1] == short
    assert recording_table.text_table(stored(2.05)).splitlines()[-1] == short
    plain = stored(2.5) | {"speculation": None, "rounds": None}
    assert "Short" not in recording_table.text_table(plain), "that aim is of speculation"
