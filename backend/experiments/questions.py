"""Short questions with one accepted answer each: how many a model answers word for word, by greedy generation.

The set ships in data/questions.jsonl: facts, sums, and answers in a form that is asked for. A model is shown some questions
with their answers and then one to complete, without a chat template, so that base models can be asked as well.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from backend.config import EngineConfig
from backend.metrics.stats import Phase
from backend.sampling_params import SamplingParams

MAX_TOKENS = 16  # of an answer

_SHOWN = (
    ("What is the capital of Germany?", "Berlin"),
    ("What is 4 + 5?", "9"),
    ("Which animal gives us wool?", "sheep"),
    ("How many months are in a year?", "12"),
    ("What is the capital of Spain?", "Madrid"),
    ("What is 8 - 3?", "5"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """Attributes:
    kind: fact, arithmetic or format.
    answer: a regular expression that the whole answer has to match, in any case of letters.
    """

    kind: str
    question: str
    answer: str

    def prompt(self) -> str:
        shown = [f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in _SHOWN]
        return "".join(shown) + f"Question: {self.question}\nAnswer:"

    def accepts(self, text: str) -> bool:
        """Whether the first line of what a model wrote, without a full stop at its end, is the answer."""
        line = text.strip().partition("\n")[0].strip().removesuffix(".")
        return re.fullmatch(self.answer, line, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    text: str
    is_correct: bool


def load_questions() -> list[Question]:
    """The set that ships."""
    lines = files("backend.experiments").joinpath("data/questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


def ask(
    config: EngineConfig, questions: Sequence[Question], on_phase: Callable[[Phase], None] = lambda phase: None
) -> list[Answer]:
    """Load the engine, let it answer all questions, and let go of it.

    Raises as `load_engine`, and `EngineError` when a request fails.
    """
    from backend.engine.loading import load_engine
    from backend.errors import EngineError

    loaded = load_engine(config, on_phase)
    engine = loaded.engine
    texts = [""] * len(questions)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop=("\n",))
        for index, question in enumerate(questions):
            token_ids = loaded.tokenizer.encode(question.prompt())
            engine.check_request(token_ids, sampling)
            engine.add_request(str(index), token_ids, sampling, time.perf_counter())
        finished = 0
        while engine.has_unfinished_requests():
            for event in engine.step():
                if event.finish_reason == "error":
                    raise EngineError(event.error or "a request failed")
                texts[int(event.request_id)] += event.text
                finished += event.finish_reason is not None
            on_phase(Phase("asking", finished, len(questions), "questions"))
    finally:
        engine.executor.shutdown()
    answers = zip(questions, texts, strict=True)
    return [Answer(question, text, question.accepts(text)) for question, text in answers]


def exact_match(answers: Sequence[Answer]) -> float:
    """Share of the questions that are answered."""
    return sum(answer.is_correct for answer in answers) / len(answers)
