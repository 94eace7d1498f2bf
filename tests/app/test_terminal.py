from __future__ import annotations

import io
import json
import os
import signal

import pytest

from app import terminal


def test_a_document_is_one_ascii_line() -> None:
    out = io.StringIO()
    terminal.write_document(out, {"text": "é\n\ud800"})
    assert out.getvalue().isascii()
    assert out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue()) == {"text": "é\n\ud800"}
    with pytest.raises(ValueError, match="JSON"):
        terminal.write_document(out, float("nan"))


def test_a_table_in_a_file_is_whole_and_holds_text_not_markup() -> None:
    out = io.StringIO()
    long = "word " * 30
    terminal.print_table(("Name", "Value"), [("[bold]a[/bold]", "1"), (long, "1,000")], "lr", out)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[2].startswith("[bold]a[/bold]")
    assert lines[2].endswith("    1")
    assert lines[3] == f"{long.strip()}    1,000"


def test_without_a_terminal_a_status_is_a_line_per_topic(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Status() as status:
        status.show("loading", "loading 1 of 3")
        status.show("loading", "loading 2 of 3")
        status.show("running", "running 0 of 4")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "loading\nrunning\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_a_flag_and_the_second_ends_the_process(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    before = signal.getsignal(number)
    with terminal.Interruption() as interruption:
        assert not interruption
        signal.raise_signal(number)
        assert interruption
        assert (interruption.exit_code, exits) == (code, [])
        signal.raise_signal(number)
        assert exits == [code]
    assert signal.getsignal(number) is before
