"""The benchmark of acceptance, with a Medusa that drafts what the target's own head says, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backend.models.sources import resolve_source
from backend.spec_decode.draft_tree import DEFAULT_TREES
from backend.spec_decode.heads.head_config import HeadConfig
from backend.spec_decode.heads.head_file import save_head
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.target import target_fingerprint
from backend.tokenizer import load_tokenizer
from benchmarks import acceptance_table
from benchmarks.speculation_acceptance import main
from tests.helpers import dense_greedy, dense_logits, load_oracle, make_tiny_llama

OUTPUT_LEN = 40
QUESTIONS = [("writing", "a"), ("math", "Sum?"), ("rag", "Which?"), ("rag", "Who?")]


def rounds_of_a_repeater(output: list[int], num_heads: int) -> list[int]:
    """Tokens of each round, where every head drafts what the target chose for the token before: zeros make it so."""
    position, rounds = 1, []
    while position < len(output):
        right = 0
        while right < num_heads and position + right < len(output) and output[position + right] == output[position - 1]:
            right += 1
        rounds.append(min(right + 1, len(output) - position))
        position += rounds[-1]
    return rounds


def test_categories_and_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_llama(tmp_path / "target", eos_token_id=511)
    source = resolve_source(str(folder))
    head = MedusaHeads(72, 3, dtype=torch.float32, device=torch.device("cpu"))
    head.initialize(torch.Generator().manual_seed(0))
    config = HeadConfig("medusa", "tiny", target_fingerprint(source), 3, (), 512, {})
    save_head(tmp_path / "head", head, config, torch.arange(512))
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"category": category, "turns": [text, "And then?"]}) for category, text in QUESTIONS]
    questions.write_text("\n".join(lines))
    output = tmp_path / "result.json"
    arguments = ["--prompts", str(questions), "--head", str(tmp_path / "head"), "--model", str(folder)]
    main([*arguments, "--output-len", str(OUTPUT_LEN), "-o", str(output)])
    result = json.loads(output.read_text())
    (measured,) = result["heads"].values()
    assert (result["num_questions"], measured["num_speculative_tokens"]) == (4, 3)
    expected: dict[str, list[int]] = {}
    for category, text in QUESTIONS:
        prompt = load_tokenizer(source).encode_chat([{"role": "user", "content": text}])
        rounds = rounds_of_a_repeater(dense_greedy(folder, prompt, OUTPUT_LEN), 3)
        for name in ("chat" if category in ("writing", "math") else category, "all"):
            expected.setdefault(name, []).extend(rounds)
    assert measured["by_category"].keys() == expected.keys()
    assert max(expected["all"]) > 1, "a head that is always wrong would show nothing"
    for name, rounds in expected.items():
        whole = measured["by_category"][name]["whole"]
        assert whole["num_rounds"] == len(rounds)
        assert whole["mean_length"] == pytest.approx(sum(rounds) / len(rounds))
    assert "by position" in capsys.readouterr().out
    table = acceptance_table.markdown([result])
    assert "**Head head (medusa, chains of 3)" in table
    assert f"| all | {len(expected['all'])} | {sum(expected['all']) / len(expected['all']):.2f} |" in table
    assert "Short of" not in table
    measured["kind"], measured["by_category"]["all"]["whole"]["mean_length"] = "eagle", 2.1
    assert "2.10 tokens of a round instead of 2.20" in acceptance_table.markdown([result])


def test_trees_follow_the_first_choices_of_the_heads(tmp_path: Path) -> None:
    """Every head ranks tokens as the target did for the token before: zeros make it so."""
    folder = make_tiny_llama(tmp_path / "target", eos_token_id=511)
    source = resolve_source(str(folder))
    head = MedusaHeads(72, 3, dtype=torch.float32, device=torch.device("cpu"))
    head.initialize(torch.Generator().manual_seed(0))
    save_head(
        tmp_path / "head",
        head,
        HeadConfig("medusa", "tiny", target_fingerprint(source), 3, (), 512, {}),
        torch.arange(512),
    )
    (tmp_path / "questions.jsonl").write_text(json.dumps({"category": "rag", "turns": ["Which?"]}))
    arguments = ["--prompts", str(tmp_path / "questions.jsonl"), "--head", str(tmp_path / "head"), "--tree"]
    main([*arguments, "--model", str(folder), "--output-len", str(OUTPUT_LEN), "-o", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    (measured,) = result["heads"].values()
    prompt = load_tokenizer(source).encode_chat([{"role": "user", "content": "Which?"}])
    text, oracle = prompt + dense_greedy(folder, prompt, OUTPUT_LEN), load_oracle(folder)
    ranked, tree = dense_logits(oracle, text).argsort(dim=-1, descending=True).tolist(), DEFAULT_TREES["medusa"]
    position, rounds = len(prompt) + 1, []
    while position < len(text):
        node, right = 0, 0
        while right < len(text) - position:
            rank = ranked[position - 2].index(text[position + right])
            if rank >= len(tree.children[node]):
                break
            node, right = tree.children[node][rank], right + 1
        rounds.append(min(right + 1, len(text) - position))
        position += rounds[-1]
    assert max(rounds) > 1
    assert (measured["num_speculative_tokens"], measured["num_nodes"]) == (3, 31)
    assert measured["by_category"]["all"]["whole"]["num_rounds"] == len(rounds)
    assert measured["by_category"]["all"]["whole"]["mean_length"] == pytest.approx(sum(rounds) / len(rounds))
    table = acceptance_table.markdown([result])
    assert "**Head head (medusa, trees of 31, 3 deep)" in table
    measured["by_category"]["all"]["whole"]["mean_length"] = 1.7
    assert "1.70 tokens of a round instead of 1.80" in acceptance_table.markdown([result])
