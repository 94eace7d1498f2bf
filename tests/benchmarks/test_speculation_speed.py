"""The benchmark of speculation's speed: a tiny target that drafts for itself, on the CPU, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.models.sources import resolve_source
from backend.spec_decode.heads.target import DenseTarget
from backend.tokenizer import load_tokenizer
from benchmarks.aims import missed_speculation
from benchmarks.speculation_acceptance import Question
from benchmarks.speculation_passes import request_rate
from benchmarks.speculation_speed import in_turns, main, parse, to_copy
from benchmarks.speculation_table import markdown, text_table
from tests.engine.heads import random_head, save
from tests.helpers import dense_greedy, make_tiny_llama
from tests.spec_decode.tiny_heads import CPU

OUTPUT_LEN = 14
QUESTIONS = [("writing", "a"), ("rag", "Which?"), ("rag", "Who?")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), eos_token_id=511)


@pytest.fixture(scope="module")
def arguments(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    questions = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"category": name, "turns": [text]}) for name, text in QUESTIONS))
    return ["--prompts", str(questions), "--model", str(target), "--output-len", str(OUTPUT_LEN)]


def test_a_draft_that_is_always_right(
    arguments: list[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an answer's tokens the first is the prompt's step, six come out of each round, and the last round is shorter."""
    path = tmp_path / "result.json"
    own = ["--proposer", "draft_model", "--proposer", "eagle", "--draft-model", str(target)]
    always = ["--set", "speculative.adaptive=false"]  # five tokens, whatever that costs on this machine
    main([*arguments, *own, *always, "--requests", "1,2", "--repeats", "2", "-o", str(path)])
    result = json.loads(path.read_text())
    rows = {(row["method"], row["requests"]): row for row in result["results"]}
    assert list(rows) == [(name, number) for name in ("plain", "draft_model", "eagle") for number in (1, 2)]
    tokenizer = load_tokenizer(resolve_source(str(target)))
    lengths = []
    for _, text in QUESTIONS:
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        lengths.append(len(dense_greedy(target, prompt, OUTPUT_LEN)))
    assert lengths == [OUTPUT_LEN] * 3, "no answer ends early"
    # 13 tokens behind the first: rounds of six, six, and one, for which a plain step does.
    for number in (1, 2):
        row, plain = rows["draft_model", number], rows["plain", number]
        assert row["same_outputs"] == 1.0
        assert row["num_drafted"] == 5
        assert row["mean_acceptance_length"] == 6
        assert row["share_of_rounds"] == 12 / 13
        assert {len(each["request_tok_s"]["samples"]) for each in (row, plain)} == {2}
        assert row["speedup"] == pytest.approx(row["request_tok_s"]["median"] / plain["request_tok_s"]["median"])
        of_a_round = 6 / ((row["draft_ms"] + row["verify_ms"]) / row["plain_ms"])
        assert row["predicted"] == pytest.approx(1 / (12 / 13 / of_a_round + 1 / 13))
        assert row["of_predicted"] == pytest.approx(row["speedup"] / row["predicted"])
        assert (row["whole_drafts"]["num_tokens"], row["whole_drafts"]["is_tree"]) == (6, False)
        assert row["whole_drafts"]["verify_cost"] == pytest.approx(row["verify_ms"] / row["plain_ms"])
        assert {name: each["mean_acceptance_length"] for name, each in row["by_category"].items()} == {
            "chat": 6,
            "rag": 6,
            "summarization + rag": 6,
        }
    # No head comes for this target, which costs the others nothing.
    shown = capsys.readouterr().out
    assert "eagle" in rows["eagle", 1]["error"]
    assert rows["eagle", 1]["error"] in shown


def test_nothing_begins_when_the_time_is_over(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    main([*arguments, "--proposer", "ngram", "--requests", "1", "--seconds", "0", "-o", str(path)])
    assert [row["error"] for row in json.loads(path.read_text())["results"]] == ["left out: 0 s were over"] * 2


def test_an_unknown_proposer_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--proposer", "oracle"])
    assert "'oracle'" in capsys.readouterr().err


def test_the_speed_of_a_request_leaves_prompts_out() -> None:
    def request(*times: float, tokens: int) -> Any:
        return SimpleNamespace(emission_times=times, num_output_tokens=tokens)

    # 10 tokens in 2 s and 5 in 1 s, behind the first ones; an answer of one token has no speed.
    assert (
        request_rate([request(8.0, 9.0, 10.0, tokens=11), request(3.0, 4.0, tokens=6), request(1.0, tokens=1)]) == 5.0
    )
    assert request_rate([request(1.0, tokens=1)]) is None


def test_categories_take_turns() -> None:
    questions = [Question(name, str(index)) for index, name in enumerate(("a", "a", "a", "b", "c", "c"))]
    assert [question.text for question in in_turns(questions)] == ["0", "3", "4", "1", "5", "2"]


def test_texts_to_copy_are_the_begins_of_what_was_to_be_summarized(target: Path, tmp_path: Path) -> None:
    text = " ".join(str(index) for index in range(100))
    questions = [Question("summarization", f"Summarize: {text}"), Question("rag", "Who?")]
    (asked,) = to_copy(questions)
    assert asked.category == "copying"
    assert asked.text.split("\n\n") == ["Repeat the following text word for word.", text[: text.index(" 80")]]
    prompts, path = tmp_path / "questions.jsonl", tmp_path / "result.json"
    records = [{"category": each.category, "turns": [each.text]} for each in questions]
    prompts.write_text("\n".join(map(json.dumps, records)))
    run = ["--prompts", str(prompts), "--model", str(target), "--output-len", "4", "--repeats", "1", "--requests", "1"]
    main([*run, "--copying", "--proposer", "ngram", "-o", str(path)])
    result = json.loads(path.read_text())
    assert (result["num_questions"], result["questions"]) == (1, "texts to copy")
    assert set(result["results"][1]["by_category"]) == {"copying"}


def test_a_tree_says_itself_how_much_it_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--prompts", "q", "--proposer", "eagle", "--set", "speculative.tree=true"])
    assert (options.set, options.proposer) == (["speculative.tree=true"], ["eagle"])
    with pytest.raises(SystemExit):
        parse(["--prompts", "q", "--proposer", "ngram", "--set", "speculative.tree=true"])
    assert "belongs to method = 'eagle' or 'medusa'" in capsys.readouterr().err


def test_of_a_tree_all_nodes_are_verified_however_short_the_accepted_path(
    arguments: list[str], target: Path, tmp_path: Path
) -> None:
    """A random head guesses next to nothing; the tree of EAGLE has 25 nodes behind the text's last token."""
    dense = DenseTarget.load(resolve_source(str(target)), CPU)
    head = save(tmp_path / "head", random_head("eagle", dense), "eagle", target, torch.arange(512))
    path = tmp_path / "result.json"
    trees = ["--set", "speculative.tree=true", "--set", "speculative.adaptive=false"]
    own = ["--proposer", "eagle", "--eagle", str(head), "--requests", "1", "--repeats", "1"]
    main([*arguments, *own, *trees, "-o", str(path)])
    row = json.loads(path.read_text())["results"][1]
    assert row["mean_acceptance_length"] < 2
    whole = row["whole_drafts"]
    assert (whole["num_tokens"], whole["is_tree"]) == (26, True)
    # Behind the prompt's own token 13 are left: trees are whole as long as six or more are.
    assert whole["num_steps"] >= len(QUESTIONS)
    assert whole["num_steps"] < row["num_steps"]


def stored() -> dict[str, Any]:
    spread = {"samples": [1500.0], "median": 1500.0, "min": 1500.0, "max": 1500.0}
    measured = {
        "request_tok_s": spread,
        "speedup": 1.4,
        "output_ratio": 1.3,
        "mean_acceptance_length": 2.5,
        "draft_ms": 0.2,
        "verify_ms": 0.5,
        "plain_ms": 0.4,
        "predicted": 1.6,
        "of_predicted": 0.875,
        "whole_drafts": {"num_tokens": 6, "num_steps": 9, "verify_cost": 1.2},
        "by_category": {
            "rag": {"speedup": 1.9, "mean_acceptance_length": 3.0},
            "copy-heavy": {"speedup": 1.9, "mean_acceptance_length": None},  # an older name
        },
    }
    return {
        "model": "m",
        "questions": "questions of Spec-Bench",
        "num_questions": 48,
        "options": {"copying": False},
        "card": "Card",
        "driver": "570.1",
        "date": "2026-12-01",
        "commit": "0123456789",
        "limits": {"copy_bytes_per_s": 4.0e12, "matmul_flops_per_s": 7.0e14},
        "environment": {"versions": {"torch": "2.11", "triton": "3.6"}},
        "results": [
            {"method": "plain", "requests": 1, "request_tok_s": spread},
            {"method": "ngram", "requests": 1, **measured, "whole_drafts": None},
            {"method": "eagle", "requests": 1, **measured},
            {"method": "eagle", "requests": 16, **measured},
            {"method": "medusa", "requests": 1, "error": "no head"},
        ],
    }


def test_a_stored_result_becomes_tables_that_name_what_falls_short() -> None:
    lines = markdown([stored()]).splitlines()
    assert [line for line in lines if line.startswith(("| plain", "| eagle | 1 ", "| medusa"))] == [
        "| plain | 1 | 1,500 | – | – | – | – | – | – | – | – | – |",
        "| eagle | 1 | 1,500 | 1.40 × | 2.50 | 0.200 ms | 0.500 ms | 0.400 ms | 1.60 × | 88% | 1.30 × "
        "| 6 tokens, 1.20 plain steps |",
        "| medusa | 1 | – | – | – | – | – | – | – | – | – | – |",
    ]
    assert "| requests at a time: 1; speedup (tokens of a round) | rag | summarization + rag |" in lines
    assert "| ngram | 1.90 × (3.00) | 1.90 × (–) |" in lines
    assert missed_speculation(stored()) == [
        "eagle at 1 requests, 1.40 × plain decoding instead of 1.5 ×",
        "eagle at 1 requests, 87.5% of what is predicted instead of 90%",
        "verifying 6 tokens (eagle at 1 requests), 1.20 plain steps instead of 1.15",
    ]
    assert lines[-1] == f"Short of what it aims at: {'; '.join(missed_speculation(stored()))}."
    assert missed_speculation(stored() | {"card": None}) == [], "a CPU's aims are others"
    copying = missed_speculation(stored() | {"options": {"copying": True}})
    assert "ngram at 1 requests, 1.40 × plain decoding instead of 2.0 ×" in copying
    assert not any(line.startswith("eagle at 1 requests, 1.40") for line in copying)
    assert "no head" in text_table(stored())
