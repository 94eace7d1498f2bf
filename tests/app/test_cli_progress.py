"""What commands say of their progress where there is no terminal: lines that can be read in a log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app import terminal
from app.cli import main
from backend.metrics.stats import Phase
from tests.experiments.quantizing import SHAPE
from tests.helpers import make_tiny_llama


class Clock:
    """In place of `time`: as late as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def layers(done: int) -> Phase:
    return Phase("quantizing", done, 30, "layers")


def test_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with terminal.Status() as status:
        for done in range(31):
            clock.now += 5
            status.show_phase(layers(done))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["quantizing", *(f"quantizing {done} of 30 layers" for done in range(3, 31, 3))]


def test_what_is_quick_has_one_line(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with terminal.Status() as status:
        for done in range(31):
            clock.now += 0.03
            status.show_phase(layers(done))
    assert capsys.readouterr().err == "quantizing\n"


def test_a_topic_that_begins_again_or_has_no_end(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """It begins at the layers that were there from an earlier run; the same topic may count anew."""
    with terminal.Status() as status:
        for phase in (layers(20), layers(21), layers(3), layers(5), layers(6), Phase("writing"), Phase("writing", 5)):
            clock.now += 5
            status.show_phase(phase)
    lines = ["quantizing", "quantizing 21 of 30 layers", "quantizing 6 of 30 layers", "writing"]
    assert capsys.readouterr().err.splitlines() == lines


def test_quantize_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_BETWEEN_LINES", 0.0)
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=3, **SHAPE)
    text = tmp_path / "text.txt"
    text.write_text("A short text to read, of a few words only. " * 4)
    quick = ["--calibration", str(text), "--windows", "1", "--window-length", "32"]
    assert main(["quantize", str(model), "-o", str(tmp_path / "out"), "--method", "int8", *quick]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quantizing")]
    assert said == ["quantizing", *(f"quantizing {done} of 3 layers" for done in (1, 2, 3))]


def test_a_certificate_counts_its_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_BETWEEN_LINES", 0.0)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abcabcabcabc"}\n' * 3)
    extent = ["--prompts", str(file), "--samples", "40", "--max-tokens", "24", "--no-store"]
    settings = ["--set", "speculative.method=ngram", "--set", "scheduler.max_num_seqs=4"]
    main(["spec", "verify", "dummy:tiny", *extent, *settings])
    said = capsys.readouterr().err
    assert said.startswith(
        "each of two engines, plain and speculative, gives a greedy answer of up to 24 tokens to 3 prompts"
    )
    assert "40 samples in all of 2 prompts\n" in said
    assert re.search(r"^(speculative|plain) decoding \d+ of 43 answers$", said, re.MULTILINE)
