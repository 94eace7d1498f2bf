"""The command line without an engine: help, stored runs, bad input."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.services import Services
from backend.config import EngineConfig
from backend.metrics.stats import RequestStats, RunEnd, RunStart, RunStatus
from backend.metrics.summary import summarize
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from tests.app.command_line import Cli

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "streamlit", "triton", "pandas", "altair")


def store_run(
    *,
    label: str | None = None,
    block_size: int = 16,
    tokens: int = 5,
    step_s: float = 0.1,
    status: RunStatus = "finished",
    num_failed: int = 0,
) -> int:
    """Record a run of one request that delivers a token every `step_s`, and of some that fail."""
    config = EngineConfig().with_overrides({"model.name": "dummy:tiny", "cache.block_size": block_size})
    with Services.open() as services:
        run_id = services.repository.create(config.to_dict(), Workload().to_dict(), label)
        recorder = RunRecorder(services.database, run_id)
        start = time.perf_counter()
        recorder.on_run_start(RunStart(start, config.to_dict(), {"cpu": "test"}, {"num_blocks": 64}, (), {}, 1))
        times = tuple(start + step_s * (index + 1) for index in range(tokens))
        request = RequestStats(
            request_id="run-0",
            index=0,
            warmup=False,
            status="finished",
            finish_reason="length",
            error=None,
            arrival_time=start,
            scheduled_time=start,
            emission_times=times,
            emission_tokens=(1,) * tokens,
            finish_time=times[-1],
            num_prompt_tokens=3,
            num_output_tokens=tokens,
            num_cached_tokens=0,
            num_preemptions=0,
            prompt="=1+1",
            text="[bold]",
            token_ids=tuple(range(tokens)),
        )
        failed = [replace(request, status="failed", error="boom") for _ in range(num_failed)]
        for item in (request, *failed):
            recorder.on_request_finished(item)
        summary = summarize([request, *failed], slo_limits={}) if status == "finished" else None
        recorder.on_run_end(RunEnd(status, times[-1], summary))
        recorder.close()
    return run_id


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["runs", "list"], ["runs", "list", "--json"]])
def test_help_and_lists_import_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from app.cli import main
code = main({arguments!r})
print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_no_command_shows_the_help(cli: Cli) -> None:
    code, out, err = cli()
    assert (code, err) == (2, "")
    for command in ("models", "generate", "run", "runs", "compare", "export", "doctor", "app"):
        assert f" {command} " in out


def test_runs_are_listed_newest_first(cli: Cli) -> None:
    assert cli("runs", "list", "--json") == (0, "[]\n", "")
    first, second = store_run(label="base"), store_run(label="[red]x[/red]", status="failed")
    code, out, _ = cli("runs", "list", "--json")
    documents = json.loads(out)
    assert code == 0
    assert [set(document) for document in documents] == [
        {"run_id", "kind", "status", "label", "created_at", "model"}
    ] * 2
    assert [(document["run_id"], document["status"]) for document in documents] == [
        (second, "failed"),
        (first, "finished"),
    ]
    assert documents[1] | {"created_at": None} == {
        "run_id": first,
        "kind": "serve",
        "status": "finished",
        "label": "base",
        "created_at": None,
        "model": "dummy:tiny",
    }
    code, out, _ = cli("runs", "list")
    assert code == 0
    assert "[red]x[/red]" in out, "a label is text, not markup"
    assert "10.0 tok/s" in out
    assert "100 ms" in out


def test_a_long_list_says_how_much_of_it_is_left_out(cli: Cli) -> None:
    with Services.open() as services:
        config, workload = EngineConfig().to_dict(), Workload().to_dict()
        ids = [services.repository.create(config, workload) for _ in range(53)][::-1]
    code, out, err = cli("runs", "list")
    assert (code, err) == (0, "3 more; --limit 53 shows all\n")
    assert f"#{ids[49]} " in out
    assert f"#{ids[50]} " not in out
    assert cli("runs", "list", "--limit", "53")[2] == ""
    assert cli("runs", "list", "--limit", "2")[2] == "51 more; --limit 53 shows all\n"
    code, out, err = cli("runs", "list", "--json")
    assert ([document["run_id"] for document in json.loads(out)], err) == (ids, "")
    code, out, err = cli("runs", "list", "--json", "--limit", "2")
    assert ([document["run_id"] for document in json.loads(out)], err) == (ids[:2], "")


def test_compare_names_runs_with_failed_requests(cli: Cli) -> None:
    whole, part = str(store_run()), str(store_run(num_failed=2))
    said = f"#{part}: 2 of 3 requests failed; its figures are of the rest\n"
    for options in ([], ["--json"]):
        code, out, err = cli("compare", whole, part, *options)
        assert (code, err) == (0, said)
    assert json.loads(out)["baseline"] == int(whole)
    assert cli("compare", whole, str(store_run()))[2] == ""


def test_a_run_is_shown_whole(cli: Cli) -> None:
    run_id = store_run(label="base", block_size=32)
    code, out, _ = cli("runs", "show", f"#{run_id}")
    assert code == 0
    for text in ("finished", "base", "Output throughput", "10.0 tok/s", "cache.block_size", "32", "num_blocks"):
        assert text in out
    code, out, _ = cli("runs", "show", str(run_id), "--json")
    document = json.loads(out)
    assert (code, document["run_id"], document["status"]) == (0, run_id, "finished")
    assert document["config"]["cache"]["block_size"] == 32
    assert document["summary"]["output_tokens"] == 5


def test_compare_names_the_difference(cli: Cli) -> None:
    slow, fast = store_run(step_s=0.1), store_run(step_s=0.05, block_size=32, label="fast")
    code, out, _ = cli("compare", str(slow), str(fast))
    assert code == 0
    assert "20.0 tok/s (×2.00)" in out
    assert "50.0 ms (−50.0 %)" in out
    assert "cache.block_size" in out
    assert "max_num_seqs" not in out, "only what differs"
    code, out, _ = cli("compare", str(slow), str(fast), "--baseline", str(fast), "--json")
    document = json.loads(out)
    throughput = next(row for row in document["metrics"] if row["metric"] == "output_throughput_tok_s")
    assert (code, document["baseline"]) == (0, fast)
    assert throughput["differences"] == [pytest.approx(-0.5), None]
    assert throughput["verdicts"] == ["worse", None]
    assert [row["key"] for row in document["settings"]] == ["cache.block_size"]


def test_export_to_a_file_and_to_stdout(cli: Cli, tmp_path: Path) -> None:
    ids = [str(store_run()), str(store_run())]
    path = tmp_path / "runs.csv"
    code, out, _ = cli("export", *ids, "--format", "csv", "-o", str(path))
    assert (code, out) == (0, "")
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    assert [row["run_id"] for row in rows] == ids
    assert rows[0]["prompt"] == "'=1+1"
    assert os.listdir(tmp_path).count("runs.csv") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".servelab-")]

    code, out, err = cli("export", ids[0], "--format", "json", "-o", "-")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document[0]["run_id"] == int(ids[0])
    assert document[0]["requests"][0]["text"] == "[bold]"

    code, _, err = cli("export", ids[0], "--format", "json", "-o", str(path))
    assert code == 1
    assert str(path) in err
    assert "--force" in err
    code, _, _ = cli("export", ids[0], "--format", "json", "-o", str(path), "--force")
    assert code == 0
    assert json.loads(path.read_text())[0]["run_id"] == int(ids[0])


def test_export_follows_links_and_keeps_what_it_cannot_replace(cli: Cli, tmp_path: Path) -> None:
    arguments = ["export", str(store_run()), "--format", "csv", "-o"]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link, target = tmp_path / "link.csv", folder / "target.csv"
    link.symlink_to(target)
    assert cli(*arguments, str(link))[0] == 0, "a dangling link is no file that exists"
    whole = target.read_bytes()
    assert (link.is_symlink(), whole[:6]) == (True, b"run_id")
    target.write_text("precious")
    target.chmod(0o600)
    code, _, err = cli(*arguments, str(link))
    assert (code, target.read_text()) == (1, "precious")
    assert f"{link} exists" in err
    before = target.stat().st_ino
    assert cli(*arguments, str(link), "--force")[0] == 0
    assert (link.is_symlink(), target.read_bytes(), target.stat().st_mode & 0o777) == (True, whole, 0o600)
    assert target.stat().st_ino != before, "replaced as a whole"
    assert os.listdir(folder) == ["target.csv"]

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as reader:
        assert cli(*arguments, str(fifo))[0] == 0
        assert reader.communicate(timeout=60)[0] == whole
    assert fifo.is_fifo()

    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    code, out, err = cli(*arguments, str(full))
    assert (code, out, err) == (1, "", f"error: {full} cannot be written: No space left on device\n")
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize(
    ("path", "fragments"),
    [
        ("", ["output path is empty"]),
        ("{folder}", ["names a folder"]),
        ("{folder}/new/", ["names a folder"]),
        ("{folder}/new/file", ["cannot be written: No such file"]),
        ("{folder}/" + "x" * 300, ["File name too long"]),
        ("{folder}/loop", ["loop", "symbolic links"]),
    ],
    ids=["empty", "folder", "slash", "missing folder", "long", "loop"],
)
def test_an_output_that_cannot_be_is_one_line(cli: Cli, tmp_path: Path, path: str, fragments: list[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    code, out, err = cli("export", str(store_run()), "--format", "csv", "-o", path.format(folder=tmp_path))
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert [fragment for fragment in fragments if fragment not in err] == [], err
    assert sorted(os.listdir(tmp_path)) == ["loop", "servelab.db"]


def test_standard_streams_that_are_closed_or_full() -> None:
    run_id = store_run()
    lines = {
        f"export {run_id} --format csv -o /dev/stdout | head -c 6": (0, "run_id"),
        "runs list --json >&-": (1, "error: cannot write to stdout: Bad file descriptor\n"),
        "runs list >/dev/full": (1, "error: cannot write to stdout: No space left on device\n"),
        "--help >/dev/full": (1, "error: cannot write to stdout: No space left on device\n"),
        "runs list --json 2>&- | head -c 2": (0, "[{"),
        f"runs delete {run_id} <&-": (
            1,
            f"Delete #{run_id} with all records? [y/N]: error: not confirmed; nothing was done\n",
        ),
    }
    processes = {
        line: subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {sys.executable} -m app.cli {line}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines
    }
    results = {}
    for line, process in processes.items():
        out, _ = process.communicate(timeout=60)
        results[line] = (process.returncode, out)
    assert results == lines


def test_deleting_a_run_named_twice_names_it_once(cli: Cli) -> None:
    run_id = store_run()
    assert cli("runs", "delete", str(run_id), f"#{run_id}", "-y") == (0, "", f"deleted #{run_id}\n")


def test_delete_asks_first(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [str(store_run()), str(store_run()), str(store_run())]
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, err = cli("runs", "delete", ids[0])
    assert (code, out) == (1, "")
    assert "nothing was done" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli("runs", "delete", ids[0])[0] == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert cli("runs", "delete", ids[0])[0] == 0
    code, _, err = cli("runs", "delete", ids[1], "99", "--yes")
    assert code == 1, "all or nothing"
    assert "#99" in err
    assert cli("runs", "delete", ids[1], "--yes")[0] == 0
    assert [run["run_id"] for run in json.loads(cli("runs", "list", "--json")[1])] == [int(ids[2])]


BAD_INPUT = [
    (["bogus"], 2, ["bogus", "servelab --help"]),
    (["runs", "list", "--bogus"], 2, ["--bogus", "servelab runs list --help"]),
    (["runs", "list", "--limit", "1" + "0" * 23], 2, ["--limit", "1000000000"]),
    (["run", "--repeat", "0"], 2, ["--repeat", "1"]),
    (["generate"], 2, ["prompt", "servelab generate --help"]),
    (["export", "1", "--format", "xml", "-o", "x"], 2, ["xml", "json", "csv"]),
    (["app", "--port", "0"], 2, ["--port", "1"]),
    (["app", "--port", "70000"], 2, ["--port", "65535"]),
    (["run", "-c", "missing.toml"], 1, ["missing.toml"]),
    (["run", "-c", "{folder}/broken.toml"], 1, ["broken.toml", "line 2"]),
    (["run", "-c", "{folder}/config.toml"], 1, ["cache.pages", "block_size"]),
    (["run", "-w", "{folder}/workload.toml"], 1, ["arrivals", "burst", "poisson"]),
    (["run", "--set", "cache.block_size=24"], 1, ["cache.block_size", "24", "16"]),
    (["run", "--set", "cache.layout=ring"], 1, ["cache.layout", "ring", "paged"]),
    (["run", "--set", "quantization.method=awq"], 1, ["quantization.method", "awq"]),
    (["run", "--set", "sampling.temperature=1"], 1, ["sampling", "model", "workload"]),
    (["run", "--set", "workload.output_len=0"], 1, ["output_len", "0"]),
    (["run", "--set", "workload.slo.ttft_ms=inf"], 1, ["ttft_ms"]),
    (["run", "-c", "~nobody-of-this-name/x.toml"], 1, ["~nobody-of-this-name/x.toml", "home"]),
    (["run", "-c", "{folder}/digits.toml"], 1, ["digits.toml", "digits"]),
    (["run", "--set", "model.name=nowhere"], 1, ["nowhere", "smollm2-135m"]),
    (["run", "--set", "workload.source.file=missing.jsonl", "--set", "model.name=dummy:tiny"], 1, ["missing.jsonl"]),
    (["models", "info", "x" * 5000], 1, ["x...'", "name too long"]),
    (["models", "info", "~nobody-of-this-name/x"], 1, ["~nobody-of-this-name/x", "home"]),
    (["models", "add", "~nobody-of-this-name/x"], 1, ["~nobody-of-this-name/x", "home"]),
    (["models", "add", "x" * 5000], 1, ["name too long", "GGUF"]),
    (["generate", ""], 1, ["prompt is empty"]),
    (["generate", "caf\udce9"], 1, ["UTF-8"]),
    (["generate", "hi", "--max-tokens", "0"], 1, ["max_tokens", "0"]),
    (["generate", "hi", "--temperature", "-1"], 1, ["temperature", "-1"]),
    (["generate", "hi", "--temperature", "nan"], 1, ["temperature", "nan"]),
    (["generate", "hi", "--seed", "-1"], 1, ["seed", "-1"]),
    (["generate", "hi", "--model", ""], 1, ["model.name"]),
    (["runs", "show", "7"], 1, ["#7", "servelab runs list"]),
    (["runs", "show", "last"], 1, ["last", "servelab runs list"]),
    (["runs", "delete", "7", "--yes"], 1, ["#7"]),
    (["compare", "7"], 1, ["#7"]),
    (["export", "7", "--format", "csv", "-o", "-"], 1, ["#7"]),
    (["models", "info", "no-such-model"], 1, ["no-such-model", "smollm2-135m"]),
    (["models", "pull", "no-such-model"], 1, ["no-such-model", "smollm2-135m"]),
    (["models", "add", "{folder}/no.gguf"], 1, ["no.gguf"]),
]


@pytest.mark.parametrize(("arguments", "exit_code", "fragments"), BAD_INPUT, ids=lambda value: str(value)[:60])
def test_bad_input_is_one_clear_line(
    cli: Cli, tmp_path: Path, arguments: list[str], exit_code: int, fragments: list[str]
) -> None:
    (tmp_path / "broken.toml").write_text("seed = 1\ncache = = 2\n")
    (tmp_path / "config.toml").write_text("[cache]\npages = 3\n")
    (tmp_path / "digits.toml").write_text("seed = " + "1" * 5000)
    (tmp_path / "workload.toml").write_text('[arrivals]\nkind = "burst"\n')
    code, out, err = cli(*(argument.replace("{folder}", str(tmp_path)) for argument in arguments))
    assert (code, out) == (exit_code, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert [fragment for fragment in fragments if fragment.lower() not in err.lower()] == [], err
    assert not (tmp_path / "servelab.db").exists() or json.loads(cli("runs", "list", "--json")[1]) == []


def test_the_help_says_what_json_does_on_an_error(cli: Cli) -> None:
    assert "stdout stays empty" in " ".join(cli("run", "--help")[1].replace("│", " ").split())


def test_an_unfinished_run_is_not_compared(cli: Cli) -> None:
    ids = [str(store_run()), str(store_run(status="cancelled"))]
    code, out, err = cli("compare", *ids, "--json")
    assert (code, out) == (1, "")
    assert f"run #{ids[1]} is cancelled" in err
    assert cli("compare", ids[0])[0] == 1
    assert "more than once" in cli("compare", ids[0], ids[0])[2]


@pytest.mark.parametrize("command", [["runs", "list", "--json"], ["run", "--json"], ["app", "--port", "8599"]])
def test_a_database_that_cannot_be_used_is_named(
    cli: Cli, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_run()
    newer, read_only, foreign = (tmp_path / f"{name}.db" for name in ("newer", "read-only", "foreign"))
    for copy in (newer, read_only):
        shutil.copy(tmp_path / "servelab.db", copy)
    with sqlite3.connect(newer) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    read_only.chmod(0o444)
    foreign.write_text("This is no database.")
    for path, fragment in ((newer, "newer"), (read_only, "read-only"), (foreign, "not a SQLite database")):
        monkeypatch.setenv("SERVELAB_DATABASE_URL", f"sqlite:///{path}")
        code, out, err = cli(*command)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert str(path) in err
        assert fragment in err


def test_a_busy_port_is_named(cli: Cli) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, out, err = cli("app", "--port", str(port))
    assert (code, out) == (1, "")
    assert (
        err
        == f"error: port {port} is in use on 127.0.0.1; choose another one, with --port 8600 or make run PORT=8600 for instance\n"
    )


def test_a_closed_pipe_is_no_traceback() -> None:
    store_run()
    command = f"{sys.executable} -m app.cli runs list --json | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_an_unforeseen_error_is_one_line_and_its_traceback_on_request(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(Services, "open", broken)
    code, out, err = cli("runs", "list")
    assert (code, out, err) == (1, "", "error: ValueError: two lines\n")
    monkeypatch.setenv("SERVELAB_DEBUG", "1")
    assert "Traceback" in cli("runs", "list")[2]
