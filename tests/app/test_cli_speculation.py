"""`generate` and `run` with speculation: what the documents say of it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.cli import main
from app.services import Services
from backend.metrics.speculation_ledger import SPECULATION_KIND, read_rounds
from db.models import ChunkRow
from tests.app.pages import page, words
from tests.app.speculation_runs import DRAFT_MS, VERIFY_MS, add_plain_run, add_speculation_run
from tests.app.stored_runs import FakeServices
from tests.app.test_cli_engine import run_json
from tests.engine.scripted import ids_of, make_scripted
from tests.helpers import make_tiny_llama

PLAIN = ["--set", "model.device=cpu"]
NGRAM = [*PLAIN, "--set", "speculative.method=ngram", "--set", "speculative.adaptive=false"]


def exported(capsys: pytest.CaptureFixture[str], file_format: str, *arguments: str) -> list[dict[str, Any]]:
    """What `export` writes, read back."""
    capsys.readouterr()
    assert main(["export", *arguments, "--format", file_format, "-o", "-"]) == 0
    text = capsys.readouterr().out
    return json.loads(text) if file_format == "json" else list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def circling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes round 'abcdef'."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "circle")  # for its tokenizer
    ids = ids_of(folder, "abcdef")
    return make_scripted(folder, [[*ids, ids[0]]])


def test_generate_tells_how_drafts_fared(capsys: pytest.CaptureFixture[str], circling: Path) -> None:
    arguments = ["generate", "a", "--raw", "--model", str(circling), "--max-tokens", "48"]
    plain = run_json(capsys, *arguments, *PLAIN)
    drafted = run_json(capsys, *arguments, *NGRAM)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    # After a circle of six tokens, seven rounds of five drafts, all right.
    assert drafted["metrics"]["mean_acceptance_length"] == 6
    assert drafted["metrics"]["draft_acceptance_rate"] == 1
    assert plain["metrics"]["mean_acceptance_length"] is None
    assert plain["metrics"]["draft_acceptance_rate"] is None


def test_generate_says_in_a_line_how_drafts_fared(capsys: pytest.CaptureFixture[str], circling: Path) -> None:
    """Of 48 tokens seven rounds of five drafts, all right; of 4, in which nothing comes again, none; and plainly no line."""

    def said(max_tokens: str, *settings: str) -> list[str]:
        arguments = ["generate", "a", "--raw", "--model", str(circling), "--max-tokens", max_tokens, *settings]
        assert main(arguments) == 0
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("speculation:")]

    assert said("48", *NGRAM) == ["speculation: 7 rounds, 35 drafted, 35 accepted (100.0 %), 6.00 tokens a round"]
    assert said("4", *NGRAM) == ["speculation: no round"]
    assert said("48", *PLAIN) == []


def test_where_lookahead_ends_is_told_with_the_length_of_the_context(
    capsys: pytest.CaptureFixture[str], circling: Path
) -> None:
    """A step of a window has a token, a draft and 12 guesses: with 43 tokens of 56 there is still room."""
    settings = ["speculative.method=lookahead", "speculative.lookahead_window=4", "speculative.lookahead_ngram=4"]
    flags = [part for line in (*settings, "model.max_model_len=56") for part in ("--set", line)]
    assert main(["generate", "a", "--raw", "--model", str(circling), "--max-tokens", "2", *PLAIN, *flags]) == 0
    said = capsys.readouterr().err
    assert "turns off for the last 13 tokens of the context, once a request has more than 43 of its 56" in said


def test_a_run_stores_its_rounds_and_what_they_come_to(
    capsys: pytest.CaptureFixture[str], circling: Path, tmp_path: Path
) -> None:
    """Figures of the summary, of the requests and of the ledger are of the same drafts; the warm-up's are in no figure."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    workload = [f"workload.source.file={prompts}", "workload.output_len=30", "workload.sampling.ignore_eos=true"]
    settings = [f"model.name={circling}", *workload, "speculative.max_batch=8"]
    document = run_json(capsys, "run", *NGRAM, *(part for line in settings for part in ("--set", line)))
    with Services.open() as opened:
        stored = opened.repository.get(document["run_id"])
        requests = opened.repository.requests(document["run_id"])
        chunks = opened.repository.chunks(document["run_id"], SPECULATION_KIND)
    assert stored is not None
    assert any("more than 8 requests decode" in notice for notice in stored.notices)
    measured = [row for row in requests if not row["warmup"]]
    counts = [tuple(row[f"num_{what}"] for what in ("rounds", "draft_tokens", "accepted_tokens")) for row in measured]
    rounds = [it for data, _, _ in chunks for it in read_rounds(data)]
    for row, (num_rounds, num_drafted, num_accepted) in zip(measured, counts, strict=True):
        own = [it for it in rounds if it.request_id == row["request_id"]]
        assert num_rounds == len(own) > 0
        assert num_drafted == sum(len(it.draft_token_ids) for it in own)
        assert num_accepted == sum(min(it.num_accepted, it.num_emitted) for it in own)
        assert row["emission_tokens"][own[0].position] == own[0].num_emitted
    rounds_in_all, drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
    assert document["summary"]["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    assert document["summary"]["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds_in_all)


def test_rounds_are_exported_as_the_ledger_has_them(capsys: pytest.CaptureFixture[str], services: FakeServices) -> None:
    """Against rounds of which each is known: a row each, in CSV and in JSON, of several runs, and none where none speculated."""
    first, made = add_speculation_run(services)
    plain, _ = add_plain_run(services)
    second, _ = add_speculation_run(services, seed=4)
    rows = exported(capsys, "json", str(first), str(plain), "--table", "rounds")
    assert len(rows) == len(made.warmup) + len(made.rounds) > 20
    outcomes = set()
    for row, each in zip(rows, [*made.warmup, *made.rounds], strict=True):
        rejected = each.draft_token_ids[each.num_accepted :][:1]
        outcomes.add((bool(rejected), row["origin"]))
        assert row == {
            "run_id": first,
            "step": each.step,
            "request_id": each.request_id,
            "warmup": each in made.warmup,
            "position": each.position,
            "draft_token_ids": list(each.draft_token_ids),
            "draft_probs": list(each.draft_probs),
            "target_probs": list(each.target_probs),
            "accept_probs": list(each.accept_probs),
            "num_accepted": each.num_accepted,
            "rejected_token_id": rejected[0] if rejected else None,
            "token_id": each.token_id,
            "origin": "recovered" if rejected else "bonus",
            "num_emitted": each.num_emitted,
            "num_nodes": None,
            "draft_ms": DRAFT_MS,
            "verify_ms": VERIFY_MS,
        }
    assert outcomes == {(True, "recovered"), (False, "bonus")}
    cells = exported(capsys, "csv", str(second), str(first), "--table", "rounds")
    assert list(cells[0]) == [*rows[0], "synthetic"]
    own = [row for row in cells if row["run_id"] == str(first)]
    assert cells[-len(own) :] == own, "in the order asked for"
    for row, known in zip(own, rows, strict=True):
        assert row.pop("synthetic") == "false"
        texts = {name: row.pop(name) for name in ("request_id", "origin")}
        assert texts == {name: known[name] for name in texts}
        assert {name: json.loads(cell or "null") for name, cell in row.items()} == {
            name: value for name, value in known.items() if name not in texts
        }
    assert exported(capsys, "json", str(plain), "--table", "rounds") == []
    assert main(["export", str(plain), "--table", "rounds", "--format", "csv", "-o", "-"]) == 0
    assert capsys.readouterr().out.strip().split(",") == list(cells[0])


def test_a_table_without_rows_is_said_and_written(
    capsys: pytest.CaptureFixture[str], services: FakeServices, tmp_path: Path
) -> None:
    plain, _ = add_plain_run(services)
    speculative, _ = add_speculation_run(services)
    other, _ = add_plain_run(services)

    def said(table: str, *run_ids: int) -> list[str]:
        output = tmp_path / "-".join(map(str, (table, *run_ids)))
        command = ["export", *map(str, run_ids), "--table", table, "--format", "csv", "-o", str(output)]
        assert main(command) == 0
        assert output.read_text().startswith("run_id,")
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]

    assert said("rounds", plain) == [f"note: no rounds of speculation in run #{plain}"]
    assert said("rounds", plain, speculative, other) == [
        f"note: no rounds of speculation in runs #{plain}, #{other}",
    ]
    assert said("quantization", plain) == [f"note: no quantization results in run #{plain}"]
    assert said("kernels", plain) == [f"note: no kernel results in run #{plain}"]
    for table in ("rounds", "requests", "steps", "runs"):
        assert said(table, speculative) == [], table


def test_a_damaged_ledger_is_named_with_its_run(capsys: pytest.CaptureFixture[str], services: FakeServices) -> None:
    run_id, _ = add_speculation_run(services)
    with services.database.write() as session:
        session.execute(update(ChunkRow).values(data=b"no ledger"))
    assert main(["export", str(run_id), "--table", "rounds", "--format", "csv", "-o", "-"]) == 1
    assert f"run #{run_id}: the speculation ledger is damaged" in capsys.readouterr().err


def test_a_proposer_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--model", "dummy:tiny", "--set", "speculative.method=crystal_ball"]) == 1
    assert "speculative.method = 'crystal_ball' is not supported" in capsys.readouterr().err


def test_synthetic_drafts_are_labelled_wherever_a_run_is_shown(
    capsys: pytest.CaptureFixture[str], services: FakeServices
) -> None:
    """`generate`, `run`, `runs show`, `compare`, `export`, and the pages; what is about tokens refuses them."""
    settings = ["speculative.method=synthetic", "speculative.synthetic_acceptance=0.75", "model.device=cpu"]
    flags = [part for line in settings for part in ("--set", line)]
    answer = run_json(capsys, "generate", "a", "--model", "dummy:tiny", "--max-tokens", "4", *flags)
    assert answer["synthetic"] is True
    workload = ["workload.source.limit=2", "workload.output_len=8", "model.name=dummy:tiny"]
    command = ["run", *flags, *(part for line in workload for part in ("--set", line))]
    documents = [run_json(capsys, *command) for _ in range(2)]
    assert [document["synthetic"] for document in documents] == [True, True]
    first, second = (str(document["run_id"]) for document in documents)
    for arguments in (["runs", "show", first], ["compare", first, second]):
        assert main(arguments) == 0
        captured = capsys.readouterr()
        assert "synthetic" in captured.out + captured.err, arguments
    plain = str(run_json(capsys, "run", *PLAIN, *command[-6:])["run_id"])
    assert run_json(capsys, "compare", plain, second)["synthetic"] == [int(second)]
    marks = [run.get("synthetic") for run in exported(capsys, "json", first, plain)]
    assert marks == [True, None]
    for table in ("requests", "steps", "rounds", "runs"):
        rows = exported(capsys, "csv", first, plain, "--table", table)
        marks = {(row["run_id"], row["synthetic"]) for row in rows}
        assert marks == ({(first, "true"), (plain, "false")} if table != "rounds" else {(first, "true")}), table
    assert "synthetic]" in words(page("detail", run=first)), "the badge beside the status"
    assert "synthetic drafts" in words(page("compare", runs=f"{first},{second}"))
    assert "synthetic drafts" in page("history").dataframe[0].value.to_string()
    assert "synthetic at 0.75, k = 5, always" in [metric.delta for metric in page("speculation", run=first).metric]
    assert "no exactness to certify" in words(page("speculation", run=first, view="Certificate"))
    for arguments in (["spec", "verify", "dummy:tiny"], ["quality", "dummy:tiny", "--text", __file__]):
        assert main([*arguments, *flags]) == 1
        assert "speculative.method = 'synthetic' has no " in capsys.readouterr().err
