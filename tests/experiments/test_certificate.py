from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config import EngineConfig
from backend.errors import ConfigError, DatabaseError
from backend.experiments.certificate import Question, Verdict, certify, read_verdict
from backend.experiments.certificate_config import DEFAULT_PROMPTS, CertificateConfig
from backend.experiments.certificate_greedy import NO_TOKEN, Answer, Choice, Divergence, Greedy, Teacher, compare_greedy
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


def teach(table: np.ndarray, end: int | None = None) -> Teacher:
    """Logarithms of the table are logits; `end`: the token that ends a text."""

    def teacher(text: Sequence[int], token_ids: Sequence[int]) -> list[Choice]:
        found = []
        for last, token_id in zip([text[-1], *token_ids[:-1]], token_ids, strict=True):
            logits = np.log(table[last])
            best = int(logits.argmax())
            gap = logits[best] - logits[end if token_id == NO_TOKEN else token_id]
            found.append(Choice(NO_TOKEN if best == end else best, float(gap)))
        return found

    return teacher


def decide(plain: Any, speculative: Any, bound: float | None = 1e-3, **settings: Any) -> Verdict:
    config = CertificateConfig.from_dict({"engine": NGRAM.to_dict(), "max_tokens": 9, "num_samples": 2000, **settings})
    return certify(
        config,
        PROMPTS,
        plain=plain,
        speculative=speculative,
        teacher=teach(plain.probs),
        logit_gap_bound=bound,
    )


def num_by_length(questions: Sequence[Question], prompt: tuple[int, ...]) -> dict[int, int]:
    """Answers to a prompt by the most tokens they may have."""
    found: Counter[int] = Counter()
    for question in questions:
        if question.token_ids == prompt:
            found[question.sampling.max_tokens] += question.sampling.n
    return dict(found)


# The verdict


def test_the_same_distribution_is_exact_and_every_answer_has_a_seed_of_its_own() -> None:
    plain, speculative = Fake(probs()), Fake(probs(), "accepted")
    verdict = decide(plain, speculative)
    assert (verdict.result, verdict.reasons) == ("exact", [])
    assert verdict.greedy == [Greedy(prompt, 9, 9, 0, []) for prompt in range(3)]
    assert verdict.sampled.num_samples == 2000
    assert verdict.sampled.num_cells > 50
    assert verdict.sampled_origins == {"accepted": 6000}
    assert verdict.origins == {"plain": 2003, "accepted": 6000 + 3 * 8}
    # Two prompts are sampled, in groups of the most samples that a prompt can have.
    sampled = [question for question in plain.questions if question.sampling.temperature > 0]
    assert sum(question.sampling.n for question in sampled) == 2000
    assert {question.token_ids for question in sampled} == {(0, 1), (2, 3)}
    others = [question for question in speculative.questions if question.sampling.temperature > 0]
    # Where drafts are verified half of the answers have room for a whole one of five behind the last compared token.
    for prompt in PROMPTS[:2]:
        assert [num_by_length(asked, prompt) for asked in (sampled, others)] == [{4: 1000}, {4: 500, 9: 500}]
    seeds = [
        question.sampling.sample(index).seed for question in sampled + others for index in range(question.sampling.n)
    ]
    assert len(set(seeds)) == 4000


def test_another_distribution_is_rejected_and_the_reasons_are_told() -> None:
    verdict = decide(Fake(probs()), Fake(probs(bias=0.2), "accepted"))
    assert verdict.result == "rejected"
    assert not any(each.divergences for each in verdict.greedy)
    assert verdict.reasons[0].startswith("sampled tokens: χ² = ")


def test_what_has_drafted_nothing_is_inconclusive() -> None:
    verdict = decide(Fake(probs()), Fake(probs()))
    assert (verdict.result, len(verdict.reasons)) == ("inconclusive", 2)  # greedy tokens and sampled ones
    assert decide(Fake(probs()), Fake(probs(), "bonus")).result == "inconclusive"
    assert decide(Fake(probs()), Fake(probs(), "recovered")).result == "exact"


def test_what_comes_behind_the_compared_tokens_is_no_part_of_a_verdict() -> None:
    """Drafted tokens there do not make a certificate of one whose compared tokens are plain."""

    @dataclass
    class Late(Fake):
        def _answer(self, question: Question, index: int) -> Answer:
            answer = Fake._answer(self, question, index)
            if question.sampling.temperature == 0:
                return answer
            return Answer(answer.token_ids, ("plain",) * 4 + answer.origins[4:])

    verdict = decide(Fake(probs()), Late(probs(), "accepted"))
    assert verdict.result == "inconclusive"
    assert verdict.reasons == ["none of the tokens that were compared in distribution had been drafted"]
    assert verdict.origins == {"plain": 3 + 4 * 2000, "accepted": 3 * 8}


def test_samples_too_few_to_be_compared_are_inconclusive() -> None:
    """Even of an engine that is wrong: everything lies in one cell then."""
    verdict = decide(Fake(probs()), Fake(probs(bias=0.3), "accepted"), num_samples=20)
    assert verdict.sampled.degrees_of_freedom == 0
    assert (verdict.result, len(verdict.reasons)) == ("inconclusive", 1)
    assert "20 samples are too few" in verdict.reasons[0]


def test_greedy_answers_without_a_drafted_token_are_inconclusive() -> None:
    """The first token of an answer comes out of the prompt."""
    verdict = decide(Fake(probs()), Fake(probs(), "accepted"), max_tokens=1)
    assert (verdict.result, verdict.reasons) == ("inconclusive", ["none of the greedy tokens had been drafted"])


# Greedy answers that differ


@dataclass
class Diverging(Fake):
    """Greedy answers to the second prompt that take another than the likeliest token at some positions.

    Attributes:
        ranks: by position, which one.
        end: the token that ends a text.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    end: int | None = None

    def _answer(self, question: Question, index: int) -> Answer:
        if question.sampling.temperature > 0 or question.token_ids != PROMPTS[1]:
            return Fake._answer(self, question, index)
        tokens = [question.token_ids[-1]]
        for position in range(question.sampling.max_tokens):
            tokens.append(int(self.probs[tokens[-1]].argsort()[-1 - self.ranks.get(position, 0)]))
            if tokens[-1] == self.end:
                return Answer(tuple(tokens[1:-1]), ("plain", *[self.origin] * (len(tokens) - 3)), stopped=True)
        return Answer(tuple(tokens[1:]), ("plain", *[self.origin] * (len(tokens) - 2)))


def near_ties(gap: float) -> np.ndarray:
    """A table in which the second token is everywhere less likely than the first by this difference of logits."""
    table = probs()
    for row in table:
        first, second = row.argsort()[::-1][:2]
        row[second] = row[first] * np.exp(-gap)
    return table / table.sum(axis=1, keepdims=True)


def greedy_answer(table: np.ndarray, **settings: Any) -> Answer:
    return Diverging(table, "accepted", **settings)._answer(Question(PROMPTS[1], SamplingParams(max_tokens=9)), 0)


def test_a_divergence_is_excused_only_between_logits_as_good_as_equal() -> None:
    """Where equality is demanded bit for bit no gap is small enough."""
    table = near_ties(5e-4)
    plain, other = greedy_answer(table), greedy_answer(table, ranks={4: 1})
    gap = teach(table)((*PROMPTS[1], *other.token_ids[:4]), other.token_ids[4:5])[0].gap
    assert gap == pytest.approx(5e-4)
    bounds = ((np.nextafter(gap, 1), "exact"), (gap, "rejected"), (1e-9, "rejected"), (None, "rejected"))
    for bound, result in bounds:
        verdict = decide(Fake(table), Diverging(table, "accepted", ranks={4: 1}), bound)
        assert verdict.result == result
        found = verdict.greedy[1]
        assert found.divergences == [Divergence(4, plain.token_ids[4], other.token_ids[4], gap, result == "exact")]
        # All behind it is what plain decoding would say there, and is checked; what has failed is not gone on with.
        assert (found.num_tokens, found.num_checked, found.num_forced) == (
            (9, 9, 5) if result == "exact" else (9, 4, 0)
        )
        if result == "rejected":
            assert verdict.reasons == [
                f"prompt 1: at output position 4 the greedy choice is {other.token_ids[4]}, of plain decoding "
                f"{plain.token_ids[4]}; their logits lie up to 0.0005 below the best one"
            ]


def test_an_error_behind_an_excused_divergence_is_found() -> None:
    """The texts differ from there on, rightly; two tokens later another one is the least likely of all."""
    table = near_ties(5e-4)
    verdict = decide(Fake(table), Diverging(table, "accepted", ranks={4: 1, 6: VOCAB_SIZE - 1}))
    found = verdict.greedy[1]
    assert verdict.result == "rejected"
    assert [(each.position, each.excused) for each in found.divergences] == [(4, True), (6, False)]
    assert (found.num_checked, found.num_forced, found.error) == (6, 2, found.divergences[1])
    last = found.divergences[1]
    wrong = greedy_answer(table, ranks={4: 1, 6: VOCAB_SIZE - 1}).token_ids
    row = np.log(table[wrong[5]])
    assert (last.plain_token_id, last.token_id, last.logit_gap) == (
        row.argmax(),
        row.argmin(),
        pytest.approx(row.max() - row.min()),
    )
    (reason,) = verdict.reasons
    assert reason.startswith(f"prompt 1: at output position 6 the greedy choice is {wrong[6]}")


def test_all_excused_divergences_of_an_answer_are_listed() -> None:
    table = near_ties(5e-4)
    verdict = decide(Fake(table), Diverging(table, "accepted", ranks={4: 1, 6: 1, 7: 1}))
    assert verdict.result == "exact"
    assert [each.position for each in verdict.greedy[1].divergences] == [4, 6, 7]
    assert all(each.excused for each in verdict.greedy[1].divergences)


@pytest.mark.parametrize("who", ["speculative", "plain"])
def test_an_end_is_a_choice_like_any_other(who: str) -> None:
    """One of the two answers ends where the other goes on, at two logits as good as equal, or not."""
    whole, end = greedy_answer(probs()).token_ids, 4
    assert end not in whole
    for gap, excused in ((5e-4, True), (1.0, False)):
        table = probs()
        row = table[whole[3]]
        row[end] = row.max() * np.exp(-gap)
        table /= table.sum(axis=1, keepdims=True)
        rank = int(row.argsort()[::-1].tolist().index(end))
        ending, going_on = greedy_answer(table, ranks={4: rank}, end=end), greedy_answer(table)
        assert (ending.token_ids, ending.stopped, going_on.token_ids) == (whole[:4], True, whole)
        answers = (going_on, ending) if who == "speculative" else (ending, going_on)
        found = compare_greedy(1, PROMPTS[1], *answers, teach(table, end), 1e-3)
        chosen = (whole[4], NO_TOKEN) if who == "speculative" else (NO_TOKEN, whole[4])
        assert [astuple(each) for each in found.divergences] == [(4, *chosen, pytest.approx(gap), excused)]
        num_tokens = 5 if who == "speculative" else 9
        assert (found.num_tokens, found.num_checked) == (num_tokens, num_tokens if excused else 4)


def test_an_answer_that_breaks_off_has_no_excuse() -> None:
    """Neither was it stopped nor has it got all tokens: whichever it is, something is wrong, at any bound."""
    table = near_ties(0.0)
    whole = greedy_answer(table)
    part = replace(whole, token_ids=whole.token_ids[:5], origins=whole.origins[:5])
    for plain, other in ((whole, part), (part, whole)):
        found = compare_greedy(1, PROMPTS[1], plain, other, teach(table), 1e9)
        assert found.error is not None
        assert (found.error.position, found.error.logit_gap, found.num_checked) == (5, None, 5)

    @dataclass
    class Short(Fake):
        def _answer(self, question: Question, index: int) -> Answer:
            answer = Fake._answer(self, question, index)
            is_short = question.sampling.temperature == 0 and question.token_ids == PROMPTS[1]
            return Answer(answer.token_ids[:5], answer.origins[:5]) if is_short else answer

    verdict = decide(Fake(probs()), Short(probs(), "accepted"))
    assert verdict.reasons == ["prompt 1: the greedy answer of speculation breaks off at output position 5"]
    verdict = decide(Short(probs()), Fake(probs(), "accepted"))
    assert verdict.reasons == ["prompt 1: the greedy answer of plain decoding breaks off at output position 5"]


def test_plain_decoding_that_is_wrong_is_no_excuse() -> None:
    """Speculation has the best token; what plain decoding says lies far below it."""
    table = probs()
    wrong, right = greedy_answer(table, ranks={4: VOCAB_SIZE - 1}), greedy_answer(table)
    found = compare_greedy(1, PROMPTS[1], wrong, right, teach(table), 1e-3)
    row = np.log(table[right.token_ids[3]])
    (divergence,) = map(astuple, found.divergences)
    assert divergence == (4, wrong.token_ids[4], right.token_ids[4], pytest.approx(row.max() - row.min()), False)


def test_equal_answers_need_no_teacher() -> None:
    def teacher(text: Sequence[int], token_ids: Sequence[int]) -> list[Choice]:
        raise AssertionError("asked about equal answers")

    answer = Answer((3, 4), ("plain", "accepted"), stopped=True)
    assert compare_greedy(0, (1,), answer, answer, teacher, None) == Greedy(0, 3, 3, 0, [])


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
    table = near_ties(5e-4)
    verdict = decide(Fake(table), Diverging(table, "accepted", ranks={4: 1, 6: VOCAB_SIZE - 1}))
    assert len(verdict.greedy[1].divergences) == 2
    assert read_verdict(verdict.encode()) == verdict
    assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False)) == verdict.to_dict()
    for damaged in (b"", b"not zlib", verdict.encode()[:-9], zlib.compress(b"[]"), zlib.compress(b'{"version": 1}')):
        with pytest.raises(DatabaseError, match="a certificate is damaged"):
            read_verdict(damaged)
    with pytest.raises(DatabaseError, match="version 3 is newer"):
        read_verdict(zlib.compress(json.dumps({"version": 3}).encode()))


def test_a_verdict_of_version_1_is_read() -> None:
    """It knew one divergence of an answer, not its tokens, and nothing behind it."""
    verdict = decide(Fake(probs()), Fake(probs(), "accepted"))
    names = ("prompt", "num_tokens", "divergence", "logit_gap", "excused")
    rows = [(0, 9, None, None, False), (1, 9, 4, 5e-4, True), (2, 9, 0, 2.5, False)]
    greedy = [dict(zip(names, row, strict=True)) for row in rows]
    document = {"version": 1, "verdict": verdict.to_dict() | {"greedy": greedy}}
    read = read_verdict(zlib.compress(json.dumps(document).encode()))
    assert read.greedy == [
        Greedy(0, 9, 9, 0, []),
        Greedy(1, 9, 5, 1, [Divergence(4, None, None, 5e-4, True)]),
        Greedy(2, 9, 0, 0, [Divergence(0, None, None, 2.5, False)]),
    ]
    assert replace(read, greedy=verdict.greedy) == verdict


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
    ("method", "tree", "num_speculative_tokens", "longest"),
    [("ngram", False, 7, 7), ("medusa", False, 4, 4), ("medusa", True, 2, 2), ("medusa", True, 32, 3)],
)
def test_the_longest_draft_is_that_of_the_deepest_path(
    method: str, tree: bool, num_speculative_tokens: int, longest: int
) -> None:
    """The tree for Medusa heads has three levels, or the first of them."""
    settings = {"method": method, "tree": tree, "num_speculative_tokens": num_speculative_tokens}
    engine = EngineConfig().with_overrides({f"speculative.{name}": value for name, value in settings.items()})
    assert CertificateConfig(engine=engine).longest_draft == longest


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
