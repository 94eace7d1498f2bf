"""`servelab quantization` from the command line to the database, and what other commands do with its runs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from app.services import Services
from tests.app.command_line import Cli
from tests.app.quantization_runs import add_quantization_run
from tests.app.stored_runs import add_run
from tests.experiments.quantizing import SHAPE
from tests.helpers import make_tiny_llama


@pytest.fixture
def stored() -> None:
    with Services.open() as services:
        add_run(services)
        add_quantization_run(services, label="lab")


def test_one_document_and_a_run(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text to read, of a few words only. " * 4)
    methods = ["--method", "int8", "--method", "none:kv=int4"]
    arguments = ["dummy:tiny", *methods, "--text", str(text), "--max-tokens", "60", "--no-speed", "--label", "first"]
    code, out, err = cli("quantization", *arguments, "--json")
    document = json.loads(out)
    assert (code, document["run_id"], document["status"], document["error"]) == (0, 1, "finished", None)
    assert [row["variant"] for row in document["results"]] == ["reference", "int8", "none:kv=int4"]
    assert [row["num_tokens"] for row in document["results"]] == [59] * 3
    assert len(document["results"][1]["layers"]) == 12
    assert err.splitlines()[0] == "run #1 first"
    with Services.open() as services:
        (run,) = services.repository.list(kind="quantization")
        results = services.repository.quantization_results(1)
    assert (run.status, run.label, run.model, run.config["text"]) == ("finished", "first", "dummy:tiny", str(text))
    assert [{name: value for name, value in row.items() if name != "run_id"} for row in results] == document["results"]


def test_a_quantized_model_is_a_variant(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_tiny_llama(tmp_path / "model", **SHAPE)
    made = ("quantize", "./model", "--method", "int4", "--head", "int8", "--windows", "1", "--window-length", "32")
    assert cli(*made, "-o", "out")[0] == 0
    assert cli(*made, "--name", "tiny-int4")[0] == 0
    methods = ["--method", "./out", "--method", "tiny-int4"]
    code, out, err = cli("quantization", "./model", *methods, "--max-tokens", "60", "--no-speed", "--json")
    _, folder, stored = json.loads(out)["results"]
    assert (code, folder["variant"], stored["variant"]) == (0, str(tmp_path / "out"), "tiny-int4")
    assert folder["kl_mean"] == stored["kl_mean"] > 0
    code, out, err = cli("quantization", "./model", *methods, "--max-tokens", "60", "--no-speed", "--no-store")
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["out", "tiny-int4"]
    code, out, err = cli("quantization", "./model", "--method", "./model")
    assert (code, out) == (1, "")
    assert f"{tmp_path / 'model'} is not quantized" in err


def test_a_table_and_no_run(cli: Cli) -> None:
    code, out, err = cli(
        "quantization", "dummy:tiny", "--method", "nf4", "--method", "gptq", "--max-tokens", "60", "--no-store"
    )
    assert code == 1
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("ref", "nf4", "gptq"))] == [
        "reference",
        "nf4",
    ]
    assert "Bits per weight" in out
    assert "no speed or peak memory: emulated" in err
    assert err.splitlines()[-1].startswith("error: gptq: dummy:tiny has no files to make a checkpoint of by gptq")
    assert not any("%" in line for line in err.splitlines()), "one line for each variant where there is no terminal"
    with Services.open() as services:
        assert services.repository.count() == 0


def test_what_is_refused_leaves_no_run(cli: Cli, tmp_path: Path) -> None:
    for arguments, message in (
        (["dummy:none"], "there is no dummy shape 'none'"),
        (["dummy:tiny", "--method", "int5"], "there is no method 'int5'"),
        (["dummy:tiny", "--max-tokens", "1"], "max_tokens"),
        (["dummy:tiny", "--text", str(tmp_path / "none")], "cannot be read as UTF-8 text"),
    ):
        code, out, err = cli("quantization", *arguments)
        assert (code, out) == (1, "")
        assert message in err
    with Services.open() as services:
        assert services.repository.count() == 0


@pytest.mark.usefixtures("stored")
def test_its_runs_are_listed_exported_and_deleted(cli: Cli) -> None:
    assert [run["kind"] for run in json.loads(cli("runs", "list", "--json")[1])] == ["quantization", "serve"]
    rows = list(csv.DictReader(io.StringIO(cli("export", "2", "--format", "csv", "-o", "-")[1])))
    assert [(row["variant"], row["perplexity"], row["emulated"]) for row in rows] == [
        ("reference", "20.0", "false"),
        ("int8", "20.5", "false"),
        ("nf4", "20.5", "true"),
        ("gptq", "", ""),
    ]
    assert len(json.loads(rows[1]["layers"])) == 12
    serving, lab = json.loads(cli("export", "1", "2", "--format", "json", "-o", "-")[1])
    assert (serving["kind"], "quantization" in serving) == ("serve", False)
    assert (lab["kind"], len(lab["quantization"]), "requests" in lab) == ("quantization", 4, False)
    rows = json.loads(cli("export", "1", "2", "--format", "json", "--table", "quantization", "-o", "-")[1])
    assert [row["run_id"] for row in rows] == [2] * 4
    assert cli("compare", "1", "2")[2] == (
        "error: run #2 is the quantization lab's; the Quantization page compares such runs\n"
    )
    assert cli("runs", "delete", "2", "--yes")[0] == 0
    with Services.open() as services:
        assert services.repository.quantization_results(2) == []
