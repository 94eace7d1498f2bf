"""`generate` and `run` on the real engine with a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app import services
from app.cli import main
from app.services import Services
from backend.engine.engine_host import EngineHost
from backend.errors import EngineError
from backend.models.sources import resolve_source
from backend.tokenizer import load_tokenizer
from db.run_rows import Row
from tests.helpers import make_tiny_llama
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--set", "model.name=dummy:tiny", "--set", "model.device=cpu", "--set", "cache.cpu_bytes=4194304"]
RUN = [*SMALL, "--set", "workload.source.limit=3", "--set", "workload.output_len=4"]
SUMMARY_FIELDS = {
    "num_requests",
    "num_failed",
    "duration_s",
    "input_tokens",
    "output_tokens",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "request_throughput_req_s",
    "goodput_req_s",
    "ttft_ms",
    "ttft_ms_by_priority",
    "tpot_ms",
    "itl_ms",
    "e2el_ms",
    "kv_cache_usage_max",
    "preemptions",
    "preemptions_swapped",
    "swapped_out_bytes",
    "swapped_in_bytes",
    "prefix_cache_hit_rate",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "peak_memory_bytes",
}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """Run one command line in this process; returns its one JSON document."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_generate_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hé", "--raw", *SMALL, "--max-tokens", "7", "--set", "cache.block_size=4"]
    document = run_json(capsys, *arguments)
    assert set(document) == {"prompt_token_ids", "token_ids", "text", "finish_reason", "metrics"}
    assert document["prompt_token_ids"] == list("hé".encode())
    assert len(document["token_ids"]) == 7
    assert document["finish_reason"] == "length"
    metrics = document["metrics"]
    assert (metrics["input_tokens"], metrics["output_tokens"]) == (3, 7)
    assert metrics["ttft_ms"] == pytest.approx(metrics["queue_ms"] + metrics["prefill_ms"])
    assert metrics["e2el_ms"] == pytest.approx(metrics["ttft_ms"] + 6 * metrics["tpot_ms"])
    assert metrics["output_throughput_tok_s"] == pytest.approx(7e3 / metrics["e2el_ms"], rel=0.05)
    assert run_json(capsys, *arguments)["token_ids"] == document["token_ids"]
    with_template = run_json(capsys, "generate", "hé", *SMALL, "--max-tokens", "1")
    expected = load_tokenizer(resolve_source("dummy:tiny")).encode_chat([{"role": "user", "content": "hé"}])
    assert with_template["prompt_token_ids"] == expected
    assert with_template["metrics"]["tpot_ms"] is None


def test_generate_samples_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def ids(seed: int) -> list[int]:
        arguments = ("generate", "hi", *SMALL, "--max-tokens", "8", "--temperature", "1.5", "--seed", str(seed))
        return run_json(capsys, *arguments)["token_ids"]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_generate_gives_several_samples_of_a_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each is what a request of its own with that seed gives; the prompt counts once."""
    model = ["--model", str(make_tiny_llama(tmp_path / "tiny")), "--set", "model.device=cpu"]
    arguments = ["generate", "a long question", *model, "--raw", "--max-tokens", "8", "--temperature", "1.5"]
    document = run_json(capsys, *arguments, "--seed", "3", "--n", "3")
    assert set(document) == {"prompt_token_ids", "samples", "metrics"}
    assert document["metrics"]["input_tokens"] == len(document["prompt_token_ids"]) == 15
    assert document["metrics"]["output_tokens"] == sum(len(sample["token_ids"]) for sample in document["samples"])
    seeds = [sample["seed"] for sample in document["samples"]]
    assert (seeds[0], len(set(seeds))) == (3, 3)
    for sample in document["samples"]:
        alone = run_json(capsys, *arguments, "--seed", str(sample["seed"]))
        assert (sample["token_ids"], sample["text"]) == (alone["token_ids"], alone["text"])
        assert 0 < sample["metrics"]["ttft_ms"] <= sample["metrics"]["e2el_ms"]
    assert len({sample["text"] for sample in document["samples"]}) == 3
    assert main([*arguments, "--seed", "3", "--n", "3"]) == 0
    headed = [f"--- sample {i + 1} of 3, seed {sample['seed']}" for i, sample in enumerate(document["samples"])]
    written = [f"{head}\n{sample['text']}\n" for head, sample in zip(headed, document["samples"], strict=True)]
    assert capsys.readouterr().out == "".join(written)


def test_generate_streams_text_and_nothing_else_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", *SMALL, "--max-tokens", "3"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "\n", "a dummy model's ids have no text"
    assert "loading" in captured.err
    assert "3 tokens" in captured.err
    assert "--json" in captured.err


def test_the_streamed_text_is_that_of_the_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "tiny")
    arguments = ["generate", "a 🙂", "--model", str(folder), "--set", "model.device=cpu", "--max-tokens", "40"]
    document = run_json(capsys, *arguments)
    assert document["text"] == load_tokenizer(resolve_source(str(folder))).decode(document["token_ids"])
    assert len(document["text"]) > 5
    assert main(arguments) == 0
    assert capsys.readouterr().out == document["text"] + "\n"


def test_what_libraries_print_stays_off_stdout() -> None:
    code = f"""
import os, subprocess, sys
from app import cli, services
new_host = services.new_host
def noisy():
    print("a library's chatter")
    os.write(1, b"a native library's chatter\\n")
    subprocess.run(["echo", "a child's chatter"], check=True)
    return new_host()
services.new_host = noisy
sys.exit(cli.main({["generate", "hi", *SMALL, "--max-tokens", "2", "--json"]!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
    assert done.stderr.count("chatter") == 3


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["generate", "hi", "--model", "dummy:nope"], ["'nope'", "tiny"]),
        (["generate", "hi", *SMALL, "--set", "model.max_model_len=2"], ["2"]),
        (["generate", "x" * 300, *SMALL, "--set", "cache.num_blocks=4"], ["64"]),
        (["generate", "hi", *SMALL, "--set", "model.max_model_len=999999999"], ["model.max_model_len", "999,999,999"]),
        (["generate", "hi", "--model", "dummy:tiny", "--set", "model.revision=main"], ["model.revision", "main"]),
        (["run", "--set", "model.name=dummy:nope"], ["'nope'", "tiny"]),
        (["run", *SMALL, "--set", "workload.source.file=missing.jsonl"], ["missing.jsonl"]),
        (["run", *SMALL, "--set", "cache.num_blocks=1"], ["16"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_cannot_be_served_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fragments: list[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert captured.err.splitlines()[-1] == errors[0]
    assert "Traceback" not in captured.err
    assert [fragment for fragment in fragments if fragment not in errors[0]] == [], errors[0]
    if arguments[0] == "generate":
        assert captured.out == ""


def test_run_records_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = run_json(capsys, "run", *RUN, "--label", "first")
    assert set(document) == {"run_id", "status", "summary"}
    assert document["status"] == "finished"
    assert set(document["summary"]) == SUMMARY_FIELDS
    assert (document["summary"]["num_requests"], document["summary"]["output_tokens"]) == (3, 12)
    with Services.open() as opened:
        stored = opened.repository.get(document["run_id"])
        requests = opened.repository.requests(document["run_id"])
    assert stored is not None
    assert (stored.status, stored.label, stored.summary) == ("finished", "first", document["summary"])
    assert stored.workload["output_len"] == 4
    assert [request["warmup"] for request in requests] == [True, False, False, False]

    second = run_json(capsys, "run", *RUN, "--set", "cache.block_size=8")
    ids = [str(document["run_id"]), str(second["run_id"])]
    comparison = run_json(capsys, "compare", *ids)
    assert "cache.block_size" in [row["key"] for row in comparison["settings"]]
    assert [run["run_id"] for run in run_json(capsys, "runs", "list")] == [second["run_id"], document["run_id"]]
    assert run_json(capsys, "runs", "show", ids[1])["config"]["cache"]["block_size"] == 8
    path = tmp_path / "steps.csv"
    assert main(["export", *ids, "--format", "csv", "--table", "steps", "-o", str(path)]) == 0
    assert len(path.read_text().splitlines()) > 8


def test_run_shows_a_table_and_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *RUN]) == 0
    captured = capsys.readouterr()
    for text in ("Output throughput", "tok/s", "Time to first token (TTFT), p99", "ms", "Peak memory"):
        assert text in captured.out
    assert captured.err.splitlines()[0].startswith("run #")
    assert "error" not in captured.err


def test_repeated_runs_come_as_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, "run", *RUN, "--repeat", "3", "--label", "again")
    assert list(document) == ["runs"]
    assert [run["status"] for run in document["runs"]] == ["finished"] * 3
    assert len({run["run_id"] for run in document["runs"]}) == 3
    assert len(run_json(capsys, "run", *RUN, "--repeat", "1")["runs"]) == 1


def test_a_run_with_failed_requests_is_no_success(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "short"}\n{"prompt": "' + "long " * 100 + '"}\n')
    arguments = ["run", *SMALL, "--set", f"workload.source.file={prompts}", "--set", "cache.num_blocks=8"]
    document = run_json(capsys, *arguments, "--set", "workload.output_len=4", code=1)
    assert document["status"] == "finished"
    assert (document["summary"]["num_requests"], document["summary"]["num_failed"]) == (2, 1)


def test_a_failed_run_says_so_in_its_document_and_ends_the_repeats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        state = "empty"
        info = None

        def load(self, config: object, on_phase: object) -> None:
            raise EngineError("no engine today")

        def close(self) -> None: ...

    monkeypatch.setattr(services, "new_host", Broken)
    document = run_json(capsys, "run", *RUN, "--repeat", "3", code=1)
    assert [run["status"] for run in document["runs"]] == ["failed"]
    assert document["runs"][0]["summary"] is None
    assert main(["run", *RUN]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "error: run #2 failed: no engine today"


def test_a_run_whose_database_is_deleted_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = EngineHost.load

    def load_and_delete(host: EngineHost, *arguments: Any) -> Any:
        (tmp_path / "servelab.db").unlink()
        return load(host, *arguments)

    monkeypatch.setattr(EngineHost, "load", load_and_delete)
    assert run_json(capsys, "run", *RUN, code=1)["status"] == "finished"
    assert main(["run", *RUN]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: run #1 is not fully recorded: the database file is gone"


def test_the_doctor_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {result["check"]: result for result in run_json(capsys, "doctor")}
    assert list(results) == ["python", "packages", "torch", "CUDA", "triton", "database", "models"]
    assert all(result["ok"] for result in results.values())
    assert sys.version.split()[0] in results["python"]["detail"]

    foreign = tmp_path / "foreign.db"
    foreign.write_text("This is no database.")
    monkeypatch.setenv("SERVELAB_DATABASE_URL", f"sqlite:///{foreign}")
    results = {result["check"]: result for result in run_json(capsys, "doctor", code=1)}
    assert [name for name, result in results.items() if not result["ok"]] == ["database"]
    assert str(foreign) in results["database"]["detail"]
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "PROBLEM" in captured.out
    assert captured.err == "error: 1 of 7 checks found a problem: database\n"


@pytest.fixture
def start() -> Iterator[Callable[[list[str], Path], subprocess.Popen[str]]]:
    """Starts a command line on a database. What still runs at the end of the test is ended."""
    started: list[subprocess.Popen[str]] = []

    def start_one(arguments: list[str], database: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"SERVELAB_DATABASE_URL": f"sqlite:///{database}"},
            # As from a shell: in the background of a script Ctrl-C is ignored, and who is started there inherits it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        with process:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stderr is not None
    assert wanted in (line.strip() for line in process.stderr)


def finished_requests(database: Path) -> list[Row]:
    """Of its only run, the warm-up left out."""
    with Services.open(f"sqlite:///{database}") as opened:
        (run,) = opened.repository.list()
        requests = opened.repository.requests(run.run_id)
    return [request for request in requests if request["status"] == "finished" and not request["warmup"]]


def test_a_signal_ends_what_runs_and_keeps_what_is_finished(
    tmp_path: Path, start: Callable[[list[str], Path], subprocess.Popen[str]]
) -> None:
    endless_run = [
        *("run", "--json", *SMALL, "--set", "workload.source.kind=synthetic", "--set", "workload.output_len=64"),
        *("--set", "workload.source.num_requests=20000", "--set", "workload.source.prompt_len=4"),
        *("--set", "workload.arrivals.kind=closed_loop"),
    ]
    long_text = ["generate", "hi", "--model", "dummy:tiny", "--max-tokens", "100000", "--json"]
    # All at once: most of the time goes into three imports of torch.
    generating = start(long_text, tmp_path / "generate.db")
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    runs = {number: start(endless_run, tmp_path / f"{number}.db") for number in signals}

    wait_for_line(generating, "loading")
    generating.send_signal(signal.SIGINT)
    out, err = generating.communicate(timeout=PATIENCE_S)
    assert (generating.returncode, out) == (130, ""), err
    assert "Traceback" not in err

    for number, process in runs.items():
        wait_for_line(process, "running")
        until(lambda number=number: finished_requests(tmp_path / f"{number}.db"))
        process.send_signal(number)
    for number, process in runs.items():
        out, err = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in err
        with Services.open(f"sqlite:///{tmp_path / f'{number}.db'}") as opened:
            (stored,) = opened.repository.list()
        assert finished_requests(tmp_path / f"{number}.db")
        if number == signal.SIGKILL:
            assert (process.returncode, out, stored.status) == (-number, "", "interrupted")
        else:
            document = json.loads(out)
            assert (process.returncode, document["status"], stored.status) == (128 + number, "cancelled", "cancelled")
            assert err.splitlines()[-1] == f"error: run #{stored.run_id} was cancelled"
