"""`servelab quantize` when others are about: two runs with one output, a kill, a disk without room, an output that appears."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from app.cli import main
from backend.quantization.single_layer import SingleLayer
from tests.helpers import make_tiny_llama
from tests.waiting import until

OPTIONS = ("--method", "gptq", "--group-size", "32", "--windows", "3", "--window-length", "64")
# Stands still where layer 2 would begin, with the two before it written.
STANDS_STILL = """
import pathlib, sys, time
from backend.quantization.single_layer import SingleLayer
load = SingleLayer.load
def stand_still(self, index, read):
    if index == 2:
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(60)
    load(self, index, read)
SingleLayer.load = stand_still
from app.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=160, **heads)


def run(model: Path, output: Path, *options: str) -> int:
    return main(["quantize", str(model), "-o", str(output), *OPTIONS, *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_run_is_refused_and_goes_on_when_the_first_was_killed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With other settings it would otherwise write its layers among the first one's."""
    output = tmp_path / "out"
    mark = tmp_path / "mark"
    first = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, str(mark), "quantize", str(model), "-o", str(output), *OPTIONS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(mark.exists)
        mark.unlink()
        before = contents(tmp_path / ".out.partial")
        for other in ((), ("--bits", "3"), ("--force",)):
            assert run(model, output, *other) == 1
            assert f"another run is making {output}; wait until it has ended" in capsys.readouterr().err
        assert contents(tmp_path / ".out.partial") == before
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not output.exists()
    assert run(model, output, "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_layers"] == 2
    assert run(model, tmp_path / "whole") == 0
    assert contents(output) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_what_gets_the_outputs_name_meanwhile_is_not_replaced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SingleLayer.load

    def somebody_writes(self: SingleLayer, index: int, read: Any) -> None:
        if index == 2:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "letter.txt").write_text("dear")
        load(self, index, read)

    with monkeypatch.context() as patch:
        patch.setattr(SingleLayer, "load", somebody_writes)
        assert run(model, tmp_path / "out") == 1
    shown = capsys.readouterr().err
    assert "exists and is not empty" in shown
    assert f"3 layers are in {tmp_path / '.out.partial'}" in shown
    assert contents(tmp_path / "out") == {"letter.txt": b"dear"}
    (tmp_path / "out" / "letter.txt").unlink()
    assert run(model, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_layers"] == 3


def test_a_layer_that_finds_no_room_costs_no_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
        if path.name.startswith("layer-1"):
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr("backend.quantization.work_folder.save_file", no_room)
        assert run(model, tmp_path / "out") == 1
    shown = capsys.readouterr().err
    assert f"{tmp_path / '.out.partial'} cannot be written: No space left on device" in shown
    assert "failed; 1 layers are in" in shown
    assert run(model, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_layers"] == 1
    assert run(model, tmp_path / "whole") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
