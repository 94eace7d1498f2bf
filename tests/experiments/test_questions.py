"""The question set that ships, what counts as an answer, and greedy answers against transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from backend.config import EngineConfig
from backend.experiments.questions import MAX_TOKENS, Question, ask, exact_match, load_questions
from backend.models.sources import ModelSource
from backend.tokenizer import load_tokenizer
from tests.helpers import dense_greedy, make_tiny_llama


def test_the_set_has_three_kinds_and_no_question_twice() -> None:
    questions = load_questions()
    assert len(questions) == 40
    assert {question.kind for question in questions} == {"fact", "arithmetic", "format"}
    assert len({question.question for question in questions}) == 40
    for question in questions:
        re.compile(question.answer)
        assert not question.accepts("")
        assert not question.accepts(question.question)
        assert f"{question.question}\nAnswer:" in question.prompt()
        assert question.prompt().count(question.question) == 1, "an answer is shown"


@pytest.mark.parametrize(
    ("asked", "text", "is_correct"),
    [
        ("What is the capital of France?", " Paris", True),
        ("What is the capital of France?", " paris.\nQuestion: What", True),
        ("What is the capital of France?", " Paris is the capital", False),
        ("What is the capital of France?", " Lyon", False),
        ("What is 7 + 8?", "15", True),
        ("What is 7 + 8?", "150", False),
        ("What is 7 + 8?", "fifteen", True),
        ("What is the largest ocean on Earth?", "The Pacific Ocean", True),
        ("Write the word cat in capital letters.", "CAT", True),
        ("Write the word cat in capital letters.", "cat", False),
    ],
)
def test_an_answer_is_right_as_a_whole(asked: str, text: str, is_correct: bool) -> None:
    (question,) = [question for question in load_questions() if question.question == asked]
    assert question.accepts(text) == is_correct


def test_answers_are_transformers_greedy_ones_up_to_the_line_end(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    source = ModelSource(str(folder), "folder", path=folder)
    tokenizer = load_tokenizer(source)
    weights = load_file(folder / "model.safetensors")
    (newline,) = tokenizer.encode("\n")
    weights["lm_head.weight"][newline] *= 2  # chosen now and then
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    questions = load_questions()[:6]
    expected, num_ended = [], 0
    for question in questions:
        token_ids = dense_greedy(folder, tokenizer.encode(question.prompt()), MAX_TOKENS)
        ends = [index for index, token_id in enumerate(token_ids) if token_id in tokenizer.eos_token_ids]
        line, end, _ = tokenizer.decode(token_ids[: ends[0] if ends else None]).partition("\n")
        expected.append(line)
        num_ended += bool(end)
    config = EngineConfig.from_dict({"model": {"name": str(folder)}})
    answers = ask(config, questions)
    assert [answer.text for answer in answers] == expected
    assert len(set(expected)) > 1
    assert 0 < num_ended < 6
    assert exact_match(answers) == 0
    # With what the model says as the answers, all but one are right.
    known = [
        Question("fact", each.question, re.escape(text.strip())) for each, text in zip(questions, expected, strict=True)
    ]
    assert exact_match(ask(config, [*known[:5], questions[5]])) == pytest.approx(5 / 6)


@pytest.mark.slow
def test_the_default_model_knows_some_and_not_all(smollm2: ModelSource) -> None:
    answers = {answer.question.question: answer for answer in ask(EngineConfig(), load_questions())}
    assert answers["What is the capital of France?"].is_correct
    assert 0.3 < exact_match(list(answers.values())) < 0.9
