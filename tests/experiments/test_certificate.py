from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config import EngineConfig
from backend.errors import ConfigError, DatabaseError
from backend.experiments.certificate import Answer, Question, Verdict, certify, read_verdict
from backend.experiments.certificate_config import DEFAULT_PROMPTS, CertificateConfig
from backend.experiments.certificate_lab import check_lab, read_prompts
from backend.sampling_params import SamplingParams

VOCAB_SIZE = 6
PROMPTS = ((0, 1), (2, 3), (4,))
NGRAM = EngineConfig().with_overrides({"speculative.method": "ngram"})


@dataclass
class Fake:
    """Answers out of a table of probabilities by the last token; a fixed kind of origin for what is behind the first token."""

    probs: np.ndarray
    origin: str = "plain"
    questions: list[Question] = field(default_factory=list)

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        self.questions += questions
        return [self._answer(question, index) for question in questions for index in range(question.sampling.n)]

    def _answer(self, question: Question, index: int) -> Answer:
        sampling = question.sampling
        generator = np.random.default_rng([sampling.seed, index])
        tokens = [question.token_ids[-1]]
        for _ in range(sampling.max_tokens):
            row = self.probs[tokens[-1]]
            tokens.append(int(row.argmax() if sampling.temperature == 0 else generator.choice(VOCAB_SIZE, p=row)))
        return Answer(tuple(tokens[1:]), ("plain", *[self.origin] * (sampling.max_tokens - 1)))


def probs(seed: int = 0, bias: float = 0.0) -> np.ndarray:
    """The same likeliest tokens at any bias towards them."""
    table = np.random.default_rng(seed).dirichlet(np.full(VOCAB_SIZE, 2.0), VOCAB_SIZE)
    best = np.eye(VOCAB_SIZE)[table.argmax(axis=1)]
    return (1 - bias) * table + bias * best


def decide(plain: Any, speculative: Any, bound: float | None = 1e-3, gap: float = 1.0, **settings: Any) -> Verdict:
    config = CertificateConfig.from_dict({"engine": NGRAM.to_dict(), "max_tokens": 9, "num_samples": 2000, **settings})
    return certify(
        config,
        PROMPTS,
        plain=plain,
        speculative=speculative,
        logit_gap=lambda token_ids: gap,
        logit_gap_bound=bound,
    )


# The verdict


def test_the_same_distribution_is_exact_and_every_answer_has_a_seed_of_its_own() -> None:
    plain, speculative = Fake(probs()), Fake(probs(), "accepted")
    verdict = decide(plain, speculative)
    assert (verdict.result, verdict.reasons) == ("exact", [])
    assert [(each.prompt, each.num_tokens, each.divergence) for each in verdict.greedy] == [
        (0, 9, None),
        (1, 9, None),
        (2, 9, None),
    ]
    assert verdict.sampled.num_samples == 2000
    assert verdict.sampled.num_cells > 50
    assert verdict.sampled_origins == {"accepted": 6000}
    assert verdict.origins == {"plain": 2003, "accepted": 6000 + 3 * 8}
    # Two prompts are sampled, in groups of the most samples that a prompt can have.
    sampled = [question for question in plain.questions if question.sampling.temperature > 0]
    assert sum(question.sampling.n for question in sampled) == 2000
    assert {question.token_ids for question in sampled} == {(0, 1), (2, 3)}
    assert {question.sampling.max_tokens for question in sampled} == {4}
    others = [question for question in speculative.questions if question.sampling.temperature > 0]
    seeds = [
        question.sampling.sample(index).seed for question in sampled + others for index in range(question.sampling.n)
    ]
    assert len(set(seeds)) == 4000


def test_another_distribution_is_rejected_and_the_reasons_are_told() -> None:
    verdict = decide(Fake(probs()), Fake(probs(bias=0.2), "accepted"))
    assert verdict.result == "rejected"
    assert all(each.divergence is None for each in verdict.greedy)
    assert verdict.reasons[0].startswith("sampled tokens: χ² = ")


def test_what_has_drafted_nothing_is_inconclusive() -> None:
    verdict = decide(Fake(probs()), Fake(probs()))
    assert (verdict.result, len(verdict.reasons)) == ("inconclusive", 2)  # greedy tokens and sampled ones
    assert decide(Fake(probs()), Fake(probs(), "bonus")).result == "inconclusive"
    assert decide(Fake(probs()), Fake(probs(), "recovered")).result == "exact"


def test_samples_too_few_to_be_compared_are_inconclusive() -> None:
    """Even of an engine that is wrong: everything lies in one cell then."""
    verdict = decide(Fake(probs()), Fake(probs(bias=0.9), "accepted"), num_samples=20)
    assert verdict.sampled.degrees_of_freedom == 0
    assert (verdict.result, len(verdict.reasons)) == ("inconclusive", 1)
    assert "20 samples are too few" in verdict.reasons[0]


def test_greedy_answers_without_a_drafted_token_are_inconclusive() -> None:
    """The first token of an answer comes out of the prompt."""
    verdict = decide(Fake(probs()), Fake(probs(), "accepted"), max_tokens=1)
    assert (verdict.result, verdict.reasons) == ("inconclusive", ["none of the greedy tokens had been drafted"])


@dataclass
class Diverging(Fake):
    """Greedy answers that are as others' up to a position."""

    place: int = 4
    ends: bool = False

    def _answer(self, question: Question, index: int) -> Answer:
        answer = Fake._answer(self, question, index)
        if question.sampling.temperature > 0 or question.token_ids != PROMPTS[1]:
            return answer
        tokens = list(answer.token_ids)
        tokens[self.place] = (tokens[self.place] + 1) % VOCAB_SIZE
        return replace(answer, token_ids=tuple(tokens[: self.place] if self.ends else tokens))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("gap", "bound", "result"),
    [(0.5, 1e-3, "rejected"), (1e-3, 1e-3, "rejected"), (9e-4, 1e-3, "exact"), (0.0, None, "rejected")],
)
def test_a_divergence_is_excused_only_between_logits_as_good_as_equal(
    gap: float, bound: float | None, result: str, ends: bool
) -> None:
    """One that ends an answer early is one too. Where equality is demanded bit for bit no gap is small enough."""
    seen: list[Sequence[int]] = []
    config = CertificateConfig.from_dict({"engine": NGRAM.to_dict(), "max_tokens": 9, "num_samples": 2000})

    def logit_gap(token_ids: Sequence[int]) -> float:
        seen.append(token_ids)
        return gap

    plain, other = Fake(probs()), Diverging(probs(), "accepted", ends=ends)
    verdict = certify(config, PROMPTS, plain=plain, speculative=other, logit_gap=logit_gap, logit_gap_bound=bound)
    assert verdict.result == result
    (found,) = [each for each in verdict.greedy if each.divergence is not None]
    assert (found.prompt, found.divergence, found.logit_gap, found.excused) == (1, 4, gap, result == "exact")
    answer = plain._answer(Question(PROMPTS[1], SamplingParams(max_tokens=9)), 0)
    assert seen == [PROMPTS[1] + answer.token_ids[:4]]
    if result == "rejected":
        assert verdict.reasons == [
            f"prompt 1: greedy tokens differ from output position 4 on, where the two best logits lie {gap:.3g} apart"
        ]


def test_answers_that_end_early_are_compared_with_their_end() -> None:
    """All but the length is the same: half of one engine's answers end after two tokens."""

    @dataclass
    class Ending(Fake):
        def _answer(self, question: Question, index: int) -> Answer:
            answer = Fake._answer(self, question, index)
            ends = question.sampling.temperature > 0 and index % 2
            return Answer(answer.token_ids[:2], answer.origins[:2]) if ends else answer

    assert decide(Ending(probs()), Ending(probs(), "accepted")).result == "exact"
    assert decide(Fake(probs()), Ending(probs(), "accepted")).result == "rejected"


def test_a_verdict_is_stored_and_read_again() -> None:
    verdict = decide(Fake(probs()), Diverging(probs(), "accepted"))
    assert read_verdict(verdict.encode()) == verdict
    assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False)) == verdict.to_dict()
    for damaged in (b"", b"not zlib", verdict.encode()[:-9], zlib.compress(b"[]"), zlib.compress(b'{"version": 1}')):
        with pytest.raises(DatabaseError, match="a certificate is damaged"):
            read_verdict(damaged)
    with pytest.raises(DatabaseError, match="version 2 is newer"):
        read_verdict(zlib.compress(json.dumps({"version": 2}).encode()))


# What it is asked


def test_plain_decoding_has_the_same_engine_without_speculation() -> None:
    engine = NGRAM.with_overrides({"cache.block_size": 32, "speculative.num_speculative_tokens": 3})
    config = CertificateConfig(model="dummy:tiny", engine=engine)
    assert config.speculative_engine == engine.with_overrides(
        {"model.name": "dummy:tiny", "speculative.adaptive": False}
    )
    assert config.plain_engine == EngineConfig().with_overrides({"cache.block_size": 32, "model.name": "dummy:tiny"})
    with pytest.raises(ConfigError, match=r"set speculative\.method"):
        _ = CertificateConfig().plain_engine
    assert CertificateConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no prompt"),
        ('{"text": "a"}', "no key 'prompt'"),
        ('{"prompt": 3}', "'prompt' is a number; expected a text"),
        ('{"prompt": ""}', "'prompt' is empty; expected a text"),
        ("nothing", "not JSON"),
        ('{"prompt": "a"}\n' * 1001, "holds more than 1,000 prompts"),
    ],
)
def test_prompts_that_cannot_be_asked(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        check_lab(CertificateConfig(model="dummy:tiny", engine=NGRAM, prompts=str(file)))


def test_prompts_come_from_the_file_or_are_those_that_ship(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "more": 1}\n\n{"prompt": "two"}\n')
    assert read_prompts(CertificateConfig(prompts=str(file))) == ["one", "two"]
    assert read_prompts(CertificateConfig()) == list(DEFAULT_PROMPTS)
