"""`servelab spec verify` from the command line to the database, and what other commands and pages do with its runs."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import main
from app.services import Services, stored_verdict
from backend.errors import DatabaseError
from backend.experiments import certificate_lab
from backend.experiments.certificate import CHUNK_KIND, Verdict, certify
from backend.experiments.certificate_config import CertificateConfig
from backend.metrics.stats import RunEnd
from db.recorder import RunRecorder
from tests.app.pages import page, words
from tests.app.stored_runs import FakeServices, add_run
from tests.experiments.test_certificate import NGRAM, PROMPTS, Diverging, Fake, near_ties, probs, teach

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run one command line in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "".join(map(chr, range(32, 127)))}) + "\n")
    engine = ["--set", "speculative.method=ngram", "--set", "scheduler.max_num_seqs=64"]
    return ["spec", "verify", "dummy:tiny", *engine, "--prompts", str(file), "--samples", "64", "--max-tokens", "8"]


def make_verdict(bias: float = 0.0) -> Verdict:
    config = CertificateConfig.from_dict({"engine": NGRAM.to_dict(), "num_samples": 1000})
    decoders = {"plain": Fake(probs()), "speculative": Fake(probs(bias=bias), "accepted")}
    return certify(config, PROMPTS, **decoders, teacher=teach(probs()), logit_gap_bound=1e-3)


def make_excused_verdict() -> Verdict:
    """Two greedy tokens of the second prompt differ, and are excused."""
    table = near_ties(5e-4)
    config = CertificateConfig.from_dict({"engine": NGRAM.to_dict(), "num_samples": 1000, "max_tokens": 9})
    decoders = {"plain": Fake(table), "speculative": Diverging(table, "accepted", ranks={4: 1, 6: 1})}
    return certify(config, PROMPTS, **decoders, teacher=teach(table), logit_gap_bound=1e-3)


def excused_lines(verdict: Verdict) -> list[list[str]]:
    """As a reader has them: prompt, position, both tokens, and how far apart."""
    lines = [
        ["1", str(each.position), str(each.plain_token_id), str(each.token_id)]
        for each in verdict.greedy[1].divergences
    ]
    return [[*line, "0.0005"] for line in lines]


def add_certificate(services: Services, data: bytes | None, status: str = "finished", error: str | None = None) -> int:
    """Store a certificate's run that has ended."""
    config = CertificateConfig.from_dict({"model": "dummy:tiny", "engine": NGRAM.to_dict()}).to_dict()
    run_id = services.repository.create(config, {}, None, kind="certificate")
    recorder = RunRecorder(services.database, run_id)
    if data is not None:
        recorder.on_chunk(CHUNK_KIND, lambda: data, 0, 0)
    recorder.on_run_end(RunEnd(status, 190.0, None, error))  # type: ignore[arg-type]
    recorder.close()
    return run_id


def test_one_document_and_a_run(cli: Cli, arguments: list[str]) -> None:
    code, out, err = cli(*arguments, "--label", "first", "--seed", "5", "--json")
    document = json.loads(out)
    verdict = document["verdict"]
    assert verdict["result"] != "rejected"
    assert code == (0 if verdict["result"] == "exact" else 1)
    assert (document["run_id"], document["status"], document["model"]) == (1, "finished", "dummy:tiny")
    assert (verdict["sampled"]["num_samples"], len(verdict["greedy"])) == (64, 1)
    assert err.splitlines()[:2] == [
        "run #1 first",
        "each of two engines, plain and speculative, gives a greedy answer of up to 8 tokens to 1 prompt, and 64 samples in all "
        "of 1 prompt",
    ]
    with Services.open() as services:
        (run,) = services.repository.list(kind="certificate")
        stored = stored_verdict(services, 1)
    assert stored is not None
    assert stored.to_dict() == verdict
    assert (run.status, run.label, run.model, run.config["seed"]) == ("finished", "first", "dummy:tiny", 5)
    assert run.environment is not None


@pytest.mark.parametrize(("bias", "code"), [(0.0, 0), (0.3, 1)])
def test_the_exit_code_is_the_verdict(
    cli: Cli, arguments: list[str], bias: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = make_verdict(bias)
    monkeypatch.setattr(certificate_lab, "certify", lambda *inputs, **others: verdict)
    found, out, err = cli(*arguments, "--no-store")
    assert found == code
    assert out.splitlines()[-1] == verdict.result == ("rejected" if code else "exact")
    assert "prompts with equal greedy tokens" in out
    assert "3,000 accepted" in out
    assert ("sampled tokens: χ² = " in err) == bool(code)
    found, out, _ = cli(*arguments, "--no-store", "--json")
    document = json.loads(out)
    assert (found, document["run_id"], document["verdict"]) == (code, None, verdict.to_dict())


def test_excused_differences_are_listed_one_a_line(
    cli: Cli, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = make_excused_verdict()
    assert (verdict.result, len(verdict.greedy[1].divergences)) == ("exact", 2)
    monkeypatch.setattr(certificate_lab, "certify", lambda *inputs, **others: verdict)
    code, out, _ = cli(*arguments)
    assert (code, out.splitlines()[-1]) == (0, "exact")
    for shown in (out, cli("runs", "show", "1")[1]):
        lines = [line.split() for line in shown.splitlines()]
        assert [line for line in lines if line[-1:] == ["0.0005"]] == excused_lines(verdict)
        assert re.search(r"^greedy tokens checked +27 of 27$", shown, re.MULTILINE)
        assert re.search(r"^of these, from a difference on, teacher forced +5$", shown, re.MULTILINE)
    (_, greedy, _) = json.loads(cli("runs", "show", "1", "--json")[1])["verdict"]["greedy"]
    assert [each["position"] for each in greedy["divergences"]] == [4, 6]
    # Where there is none there is no list.
    monkeypatch.setattr(certificate_lab, "certify", lambda *inputs, **others: make_verdict())
    assert "are excused:" not in cli(*arguments, "--no-store")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spec", "verify", "dummy:tiny"], "set speculative.method, as in speculative.method=ngram"),
        (["spec", "verify", "nowhere", "--set", "speculative.method=ngram"], "nowhere"),
        (["spec", "verify", "--set", "model.name=nowhere", "--set", "speculative.method=ngram"], "'nowhere'"),
        (
            ["spec", "verify", "dummy:tiny", "--set", "model.name=smollm2-135m"],
            "MODEL is 'dummy:tiny' and model.name is 'smollm2-135m': name one of them",
        ),
        (["spec", "verify", "--set", "speculative.method=ngram", "--samples", "3"], "num_samples = 3"),
        (["spec", "verify", "--set", "speculative.method=ngram", "--prompts", "missing"], "missing"),
    ],
)
def test_what_cannot_be_verified_leaves_no_run(cli: Cli, arguments: list[str], message: str) -> None:
    code, out, err = cli(*arguments, "--json")
    assert (code, out) == (1, "")
    assert message in err
    with Services.open() as services:
        assert services.repository.count() == 0


def test_a_certificate_is_listed_and_not_compared(cli: Cli) -> None:
    with Services.open() as services:
        add_run(services)
        run_id = add_certificate(services, make_verdict().encode())
    _, out, _ = cli("runs", "list", "--json")
    assert [row["kind"] for row in json.loads(out)] == ["certificate", "serve"]
    code, _, err = cli("compare", "1", str(run_id))
    assert code == 1
    assert "run #2 is a certificate of speculation; it has no figures to compare" in err


def test_a_certificate_is_shown_and_exported_with_its_verdict(cli: Cli) -> None:
    verdict = make_verdict(0.3)
    with Services.open() as services:
        ids = [str(add_certificate(services, data)) for data in (verdict.encode(), None, b"damaged")]
    code, out, _ = cli("runs", "show", ids[0])
    assert code == 0
    assert re.search(r"^Certificate .* rejected$", out, re.MULTILINE)
    assert re.search(rf"^samples by each +{verdict.sampled.num_samples:,}$", out, re.MULTILINE)
    assert json.loads(cli("runs", "show", ids[0], "--json")[1])["verdict"] == verdict.to_dict()
    for without in ids[1:]:
        code, out, err = cli("runs", "show", without, "--json")
        assert (code, json.loads(out)["verdict"]) == (0, None)
    assert "a certificate is damaged" in err
    for table in ([], ["--table", "runs"]):
        whole, empty = json.loads(cli("export", *ids[:2], "--format", "json", "-o", "-", *table)[1])
        assert ("verdict" in whole) == (not table)
        assert not any(key.startswith("verdict") for key in empty)
    assert whole["verdict.result"] == "rejected"
    assert whole["verdict.sampled.p_value"] == verdict.sampled.p_value
    (row, _) = csv.DictReader(cli("export", *ids[:2], "--format", "csv", "--table", "runs", "-o", "-")[1].splitlines())
    assert row["verdict.result"] == "rejected"
    assert json.loads(row["verdict.greedy"]) == verdict.to_dict()["greedy"]
    code, _, err = cli("export", ids[2], "--format", "json", "-o", "-")
    assert code == 1
    assert "a certificate is damaged" in err


def test_a_damaged_certificate_says_so(services: FakeServices) -> None:
    run_id = add_certificate(services, b"damaged")
    with pytest.raises(DatabaseError, match="a certificate is damaged"):
        stored_verdict(services, run_id)
    assert "a certificate is damaged" in words(page("detail", run=str(run_id)))


def test_the_detail_page_shows_the_verdict(services: FakeServices) -> None:
    rejected = make_verdict(0.3)
    exact = replace(make_verdict(), result="exact")
    ids = [add_certificate(services, verdict.encode()) for verdict in (rejected, exact)]
    ids.append(add_certificate(services, None, "failed", "there is no model 'nowhere'"))
    app = page("detail", run=str(ids[0]))
    assert "sampled tokens: χ² = " in words(app)
    assert "certificate: ngram, 4,096 samples" in words(app)
    assert "1,000" in app.table[0].value.to_string()
    assert page("detail", run=str(ids[1])).table
    assert "there is no model 'nowhere'" in words(page("detail", run=str(ids[2])))
    assert "certificate: ngram, 4,096 samples" in page("history").dataframe[0].value.to_string()
