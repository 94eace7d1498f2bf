"""`speculative.method = draft_model`: a draft that is the target itself is always right, wherever its keys and values are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from backend.core.kv_groups import KVGroupSpec
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError
from backend.spec_decode.draft_model import DraftModelProposer
from backend.spec_decode.proposer import DraftOutput, DraftRequest
from tests.engine.driving import Answer, Pausing, answers, config_of, submit, submit_to, tokens
from tests.engine.test_equivalence import prompts_of
from tests.engine.test_samples import samples
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama, make_tiny_model

PROMPTS = prompts_of([1, 2, 15, 16, 17, 40, 100])
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
NUM_TOKEN_IDS = 259  # of the tokenizer: bytes, and three that are added


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller, of another shape, and random: it is hardly ever right."""
    folder = tmp_path_factory.mktemp("models") / "other"
    changes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny_llama(folder, seed=3, head_dim=8, **changes)


def drafting(model: object, draft: object, **overrides: Any) -> Any:
    named = {} if draft is None else {"speculative__model": str(draft)}
    return config_of(model, speculative__method="draft_model", **named, **overrides)


def counts(collected: dict[str, Answer]) -> tuple[int, int]:
    """Drafted and accepted tokens of all."""
    each = [answer.last.speculation for answer in collected.values()]
    return sum(it.num_draft_tokens for it in each if it), sum(it.num_accepted_tokens for it in each if it)


MATRIX: dict[str, dict[str, Any]] = {
    "blocks of one": {"cache__block_size": 1},
    "chunks": {"scheduler__max_num_batched_tokens": 16, "cache__block_size": 4},
    "two at a time": {"scheduler__max_num_seqs": 2},
    "preempted": {"cache__num_blocks": 10},
    "swapped": {"cache__num_blocks": 10, "scheduler__preemption": "swap"},
    "contiguous": {"cache__layout": "contiguous"},
    "int8 cache": {"cache__dtype": "int8"},
}


@pytest.mark.parametrize(
    ("name", "draft"), [*((name, "itself") for name in MATRIX), ("chunks", "other"), ("preempted", "other")]
)
def test_speculative_equals_plain(
    host: EngineHost,
    tiny_llama: Path,
    other_llama: Path,
    expected: dict[str, list[int]],
    name: str,
    draft: str,
) -> None:
    options = MATRIX[name]
    if "cache__dtype" in options:
        host.load(config_of(tiny_llama, **options))
        expected = tokens(host, PROMPTS, **GREEDY)
    host.load(drafting(tiny_llama, tiny_llama if draft == "itself" else other_llama, **options))
    for turn in range(2):
        collected = answers(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected, f"turn {turn}"
        drafted, accepted = counts(collected)
        assert drafted > 50
        assert (accepted == drafted) == (draft == "itself")
    if name in ("preempted", "swapped"):
        assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_a_draft_with_the_windows_of_its_target(
    host: EngineHost, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    model = make_tiny_model(tmp_path / "model", architecture, **changes)
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}
    host.load(drafting(model, model, cache__block_size=4, scheduler__max_num_batched_tokens=30))
    for _ in range(2):
        collected = answers(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        drafted, accepted = counts(collected)
        assert drafted == accepted > 50


def test_a_draft_without_the_windows_of_its_target_is_refused(
    host: EngineHost, tmp_path: Path, tiny_llama: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", "Mistral", sliding_window=8)
    with pytest.raises(
        ConfigError, match="has layers without a window, and the target's are all with a window of 8 tok"
    ):
        host.load(drafting(model, tiny_llama))


def test_samples_of_a_prompt_draft_from_what_the_first_has_computed(host: EngineHost, tiny_llama: Path) -> None:
    prompts = prompts_of([17, 33])
    host.load(drafting(tiny_llama, tiny_llama))
    collected = samples(host, prompts, n=3, **GREEDY)
    oracle = load_oracle(tiny_llama)
    for key, prompt in prompts.items():
        assert all(collected[f"{key}/{index}"].token_ids == dense_greedy(oracle, prompt, 24) for index in range(3))
    drafted, accepted = counts(collected)
    assert drafted == accepted > 50


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_a_draft_drawn_from_the_target_s_own_distribution_is_accepted(
    host: EngineHost, tiny_llama: Path, filters: dict[str, Any]
) -> None:
    """With probability one, but for rounding; one drawn from any other is refused somewhere among so many."""
    host.load(drafting(tiny_llama, tiny_llama))
    collected = answers(host, PROMPTS, temperature=0.8, seed=4, max_tokens=40, ignore_eos=True, **filters)
    drafted, accepted = counts(collected)
    assert drafted == accepted > 150
    again = answers(host, PROMPTS, temperature=0.8, seed=4, max_tokens=40, ignore_eos=True, **filters)
    assert [it.token_ids for it in again.values()] == [it.token_ids for it in collected.values()]


def test_without_a_model_the_target_s_first_layers_draft(
    host: EngineHost, tmp_path: Path, tiny_llama: Path, expected: dict[str, list[int]]
) -> None:
    """On a model whose other layers add nothing they are always right; on any other the tokens are still the target's."""
    host.load(drafting(tiny_llama, None))
    assert tokens(host, PROMPTS, **GREEDY) == expected
    weights_bytes, kv_bytes = (host.info.load[key] for key in ("weights_bytes", "kv_cache_bytes"))  # type: ignore[union-attr]
    host.load(config_of(tiny_llama))
    assert (weights_bytes, kv_bytes) == tuple(host.info.load[key] for key in ("weights_bytes", "kv_cache_bytes"))  # type: ignore[union-attr]
    folder = make_tiny_llama(tmp_path / "model", num_hidden_layers=4)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            tensor.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    host.load(config_of(folder))
    plain = tokens(host, PROMPTS, **GREEDY)
    host.load(drafting(folder, None, cache__num_blocks=10, cache__dtype="auto"))
    collected = answers(host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == plain
    drafted, accepted = counts(collected)
    assert drafted == accepted > 50


def test_sd_5_a_draft_with_a_shorter_context(host: EngineHost, tmp_path: Path, tiny_llama: Path) -> None:
    """Up to its end it drafts; behind it nothing is drafted, and the run says so."""
    short = shutil.copytree(tiny_llama, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    prompts = prompts_of([120, 200, 250])
    oracle = load_oracle(tiny_llama)
    lengths = {"p120": 64, "p200": 56, "p250": 6}
    expected = {key: dense_greedy(oracle, prompt, lengths[key]) for key, prompt in prompts.items()}
    info = host.load(drafting(tiny_llama, short, model__max_model_len=256))
    assert any("speculation is off for requests of more than 128 tokens" in notice for notice in info.notices)
    collected = answers(host, prompts, max_tokens=64, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert {answer.finish_reason for answer in collected.values()} == {"length"}
    speculation = {key: answer.last.speculation for key, answer in collected.items()}
    # Tokens 121 to 126 by a round behind the prompt's own, and 127 to 129: the last draft is one of two.
    assert speculation == {"p120": (2, 7, 7), "p200": (0, 0, 0), "p250": (0, 0, 0)}


@pytest.mark.parametrize("vocab_size", [400, 528])
def test_sd_7_padded_vocabularies_go_together(
    host: EngineHost, tmp_path: Path, tiny_llama: Path, vocab_size: int, expected: dict[str, list[int]]
) -> None:
    """Fewer or more rows than the target's 512, of which 259 are tokens; the random target gives any of them."""
    draft = make_tiny_llama(tmp_path / "draft", vocab_size=vocab_size, seed=1)
    host.load(drafting(tiny_llama, draft))
    assert any(token_id >= 400 for output in expected.values() for token_id in output)
    collected = answers(host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected


@pytest.mark.parametrize("vocab_size", [400, 528])
def test_sd_7_no_padding_is_ever_a_token(
    host: EngineHost, tmp_path: Path, tiny_llama: Path, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target that never gives what is no token, as a trained one, beside a draft that does so often."""
    target = shutil.copytree(tiny_llama, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"][NUM_TOKEN_IDS:] = (
        0  # below the best twenty of the tokens, whose logits have a spread of 3
    )
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    draft = make_tiny_llama(tmp_path / "draft", vocab_size=vocab_size, seed=1)
    drafted: list[int] = []
    propose = DraftModelProposer.propose

    def noted(proposer: DraftModelProposer, requests: Sequence[DraftRequest]) -> DraftOutput:
        output = propose(proposer, requests)
        rows = zip(output.token_ids.tolist(), output.num_tokens, strict=True)
        drafted.extend(token_id for row, count in rows for token_id in row[:count])
        return output

    monkeypatch.setattr(DraftModelProposer, "propose", noted)
    host.load(drafting(target, draft))
    oracle = load_oracle(target)
    for sampling in ({}, {"temperature": 1.5, "top_k": 20, "seed": 2}):
        drafted.clear()
        given = tokens(host, PROMPTS, **GREEDY, **sampling)
        if not sampling:
            assert given == {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}
        assert sum(token_id >= NUM_TOKEN_IDS for token_id in drafted) > len(drafted) / 5
        assert max(drafted) < 512
        assert all(len(output) == 24 and max(output) < NUM_TOKEN_IDS for output in given.values())


def test_sd_7_another_vocabulary_is_refused_by_its_first_difference(
    host: EngineHost, tmp_path: Path, tiny_llama: Path
) -> None:
    draft = shutil.copytree(tiny_llama, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    first = min(vocabulary["A"], vocabulary["B"])
    message = rf"token {first} is '[AB]' there, and '[AB]' here; a draft model needs the same tokenizer"
    with pytest.raises(ConfigError, match=message):
        host.load(drafting(tiny_llama, draft))


def test_a_block_counts_the_bytes_of_the_draft_s_layers(host: EngineHost, tiny_llama: Path, other_llama: Path) -> None:
    """Target: 3 layers of 3 heads of 8; draft: 2 of 2 of 8. Keys and values of 4 bytes."""
    target, both = KVGroupSpec(3, 3, 8, 4).bytes_per_token, 2 * 4 * 8 * (3 * 3 + 2 * 2)
    info = host.load(drafting(tiny_llama, other_llama, cache__num_blocks=20))
    assert info.load["kv_bytes_per_token"] == both > target
    assert info.load["kv_cache_bytes"] == 21 * 16 * both


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_keys_that_nobody_drafted_behind_are_computed_when_they_are_found_again(
    host: EngineHost, tiny_llama: Path, block_size: int
) -> None:
    """The target as its own draft is right but for near ties, as long as its keys and values are whole: also behind a text whose
    answer was decoded in steps without drafts, and of a request that finds the beginning of one that is still under way."""
    options = {"cache__block_size": block_size, "cache__num_blocks": 800 // block_size, "speculative__max_batch": 1}
    host.load(drafting(tiny_llama, tiny_llama, **options))
    prompts = {"a": list(range(10, 30)), "b": list(range(40, 60))}
    first = answers(host, prompts, max_tokens=60, ignore_eos=True)
    assert counts(first)[0] < 60, "beside each other they decode without drafts"
    again = {"c": [*prompts["a"], *first["a"].token_ids[:50]]}
    drafted, accepted = counts(answers(host, again, max_tokens=30, ignore_eos=True))
    assert accepted > 0.9 * drafted > 20
    host.load(drafting(tiny_llama, tiny_llama, **options | {"speculative__max_batch": None}))
    going = Pausing()
    submit_to(going, host, "d", prompts["a"], max_tokens=60, ignore_eos=True)
    with going.paused():
        late = submit(host, "e", [*prompts["a"], 7, 8, 9], max_tokens=40, ignore_eos=True)
    drafted, accepted = counts({"d": going, "e": late})
    assert accepted > 0.9 * drafted > 60
