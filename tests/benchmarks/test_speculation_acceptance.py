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
from backend.spec_decode.heads.loops import in_loop
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


def naive_ngram_rounds(text: list[int], begin: int, num_steps: int) -> list[tuple[int, int, bool]]:
    """Position, tokens, and whether there was a draft, of each round; the text is searched from its end each time."""
    position, rounds = begin + 1, []
    while position < len(text):
        known, draft = text[:position], []
        for n in (3, 2, 1):
            ends = [end for end in range(n, position) if known[end - n : end] == known[position - n :]]
            if ends:
                draft = [known[ends[-1] + step % (position - ends[-1])] for step in range(num_steps)]
                break
        right = 0
        while right < len(draft) and position + right < len(text) and draft[right] == text[position + right]:
            right += 1
        rounds.append((position, min(right + 1, len(text) - position), bool(draft)))
        position += rounds[-1][1]
    return rounds


def test_ngrams_are_looked_up_in_what_is_known_by_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any head, against a search of the whole text at every round."""
    folder = make_tiny_llama(tmp_path / "target", eos_token_id=511)
    questions, output = tmp_path / "questions.jsonl", tmp_path / "result.json"
    questions.write_text("\n".join(json.dumps({"category": name, "turns": [text]}) for name, text in QUESTIONS))
    arguments = ["--prompts", str(questions), "--model", str(folder), "--output-len", str(OUTPUT_LEN)]
    main([*arguments, "--proposer", "ngram", "--num-speculative-tokens", "4", "-o", str(output)])
    result = json.loads(output.read_text())
    assert result["heads"] == {}
    measured = result["proposers"]["ngram"]
    assert (measured["kind"], measured["num_speculative_tokens"], measured["ngram_min"]) == ("ngram", 4, 1)
    whole: dict[str, list[tuple[int, bool]]] = {}
    no_loops: dict[str, list[int]] = {}
    tokenizer = load_tokenizer(resolve_source(str(folder)))
    for category, text in QUESTIONS:
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        answer = dense_greedy(folder, prompt, OUTPUT_LEN)
        looping = in_loop(answer)
        for position, tokens, has_draft in naive_ngram_rounds(prompt + answer, len(prompt), 4):
            for name in ("chat" if category in ("writing", "math") else category, "all"):
                whole.setdefault(name, []).append((tokens, has_draft))
                kept = no_loops.setdefault(name, [])
                kept += [] if looping[position - len(prompt)] else [tokens]
    assert measured["by_category"].keys() == whole.keys()
    assert {1, 5} <= {tokens for tokens, _ in whole["all"]}, "drafts that are refused, and whole ones"
    assert len({has_draft for _, has_draft in whole["all"]}) == 2, "and steps without a draft"
    for name, rounds in whole.items():
        of = measured["by_category"][name]
        assert of["whole"]["num_rounds"] == len(rounds)
        assert of["whole"]["mean_length"] == pytest.approx(sum(tokens for tokens, _ in rounds) / len(rounds))
        assert of["share_drafted"] == pytest.approx(sum(has_draft for _, has_draft in rounds) / len(rounds))
        left = no_loops[name]
        assert (of["no_loops"] or {}).get("mean_length") == (pytest.approx(sum(left) / len(left)) if left else None)
    assert "ngram: ngram, chains of 4" in capsys.readouterr().out
    measured["by_category"]["rag"]["whole"]["mean_length"] = 1.4
    table = acceptance_table.markdown([result])
    assert "**N-grams of 1 to 3 tokens (chains of 4) on 4 first turns" in table
    assert "Counted by simulation over the target's own greedy answers" in table
    assert "Short of" not in table
    measured["by_category"]["rag"]["whole"]["mean_length"] = 1.39
    assert "Short of what it aims at: rag, 1.39 tokens of a round instead of 1.40." in acceptance_table.markdown(
        [result]
    )


def test_a_run_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prompts", "q"])
    assert "give a --head or a --proposer" in capsys.readouterr().err
