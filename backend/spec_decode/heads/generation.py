"""Conversations that a target writes itself, for its draft heads to learn from.

A chat model that is given its template up to where the user's words begin goes on with a user's words (Xu et al., "Magpie:
Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2024). Half of the conversations begin with the
first words of a task, for the breadth of them; where texts are named, they are the users' words instead. Then the target
answers, half of the time greedily.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError, EngineError
from backend.quantization.calibration import read_texts
from backend.sampling_params import SamplingParams
from backend.spec_decode.heads.loops import loop_at_end
from backend.spec_decode.heads.training_data import Conversation
from backend.tokenizer import Tokenizer
from backend.workload.targets import StreamEvent

WRITER_VERSION = 1  # to be raised when the same seed gives other conversations than before
OPENINGS = Path(__file__).with_name("data") / "openings.txt"

_MAX_USER_TOKENS = 512
_MAX_ANSWER_TOKENS = 256
_LOOP_TOKENS = (
    32  # of an answer that goes round in a loop to its end, where the conversation is cut: more teach nothing
)
_OPENING_SHARE = 0.5
_SECOND_TURN_SHARE = 0.3
_USER_TEMPERATURES = (0.7, 1.0)
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What a model's chat template puts around the words of user and assistant, as ids."""

    before_user: tuple[int, ...]
    before_answer: tuple[int, ...]
    between: tuple[int, ...]  # from the end of an answer to where the user's next words begin

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFrame:
        """Raises `RequestError` for a model without a chat template, `ConfigError` for one that rewrites what is said."""
        user, assistant = "X", "Y"
        (mark,), (answer_mark,) = tokenizer.encode(user), tokenizer.encode(assistant)
        once = tokenizer.encode_chat([{"role": "user", "content": user}])
        other = tokenizer.encode_chat([{"role": "user", "content": assistant}])
        places = [index for index, pair in enumerate(zip(once, other, strict=True)) if pair == (mark, answer_mark)]
        turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        twice = tokenizer.encode_chat([*turns, {"role": "user", "content": user}])
        if len(places) == 1:
            start, end = places[0], places[0] + 1
            before_user, before_answer = tuple(once[:start]), tuple(once[end:])
            rest = twice[len(once) :]
            tail = [mark, *before_answer]
            if twice[: len(once)] == once and rest[:1] == [answer_mark] and rest[-len(tail) :] == tail:
                return cls(before_user, before_answer, tuple(rest[1 : -len(tail)]))
        raise ConfigError("the model's chat template does not keep what is said apart; name prompts with --prompts")


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """All that is drawn of a conversation before it is written: a pure function of (seed, index)."""

    seed: int
    num_turns: int
    opening: str | None  # None: the target chooses the first words
    user_temperature: float
    answer_temperature: float
    text: str | None = None  # the user's only words, whole


def plan_conversation(
    seed: int, index: int, openings: Sequence[str], texts: Sequence[str], self_generated: bool
) -> ConversationPlan:
    """`ConversationPlan` number `index`: with both kinds asked for, texts and the target's own words alternate."""
    generator = np.random.default_rng([seed, index])
    own_seed = int(generator.integers(2**62))
    share, opening_share = generator.random(2)
    opening = openings[int(generator.integers(len(openings)))] if opening_share < _OPENING_SHARE else None
    user_temperature = float(generator.choice(_USER_TEMPERATURES))
    answer_temperature = float(generator.choice(_ANSWER_TEMPERATURES))
    if texts and (not self_generated or index % 2):
        number = index // 2 if self_generated else index
        if number >= len(texts) and answer_temperature == 0:
            answer_temperature = max(_ANSWER_TEMPERATURES)  # its greedy answer is there
        text = texts[number % len(texts)]
        return ConversationPlan(own_seed, 1, None, user_temperature, answer_temperature, text)
    num_turns = 2 if share < _SECOND_TURN_SHARE else 1
    return ConversationPlan(own_seed, num_turns, opening, user_temperature, answer_temperature)


def read_openings() -> list[str]:
    """One a line, with `\\n` for a line break."""
    lines = OPENINGS.read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n") for line in lines if line]


def read_prompts(path: Path) -> list[str]:
    """Users' words: the paragraphs of a text, or what the lines of a `.jsonl` file have in `text` or `prompt`.

    Raises `ConfigError` for a file that cannot be read, or has none.
    """
    texts = read_texts(path)
    if path.suffix != ".jsonl":
        texts = re.split(r"\n\s*\n", texts[0])
    prompts = [text.strip() for text in texts if text.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


@dataclass(slots=True)
class _Draft:
    """A conversation that is being written."""

    plan: ConversationPlan
    token_ids: list[int]
    is_answer: list[bool] = field(default_factory=list)
    new: list[int] = field(default_factory=list)  # of the part under way
    answering: bool = False
    turns_done: int = 0

    def add(self, token_ids: Sequence[int], is_answer: bool) -> None:
        self.token_ids += token_ids
        self.is_answer += [is_answer] * len(token_ids)


class ConversationWriter:
    """Has the engine of a host write conversations, all of a call at once."""

    def __init__(self, host: EngineHost, max_length: int) -> None:
        """Args:
        max_length: tokens of a conversation; the engine's context must be no shorter.
        """
        self._host, self._tokenizer, self._max_length = host, host.tokenizer, max_length
        self._frame = ChatFrame.of(host.tokenizer)
        self._ended: SimpleQueue[tuple[int, StreamEvent]] = SimpleQueue()

    def write(self, plans: Sequence[ConversationPlan]) -> list[Conversation]:
        """In the plans' order; one whose words leave no room for an answer is left out. Raises `EngineError`."""
        drafts = [_Draft(plan, []) for plan in plans]
        unfinished = sum(self._begin(number, draft) for number, draft in enumerate(drafts))
        while unfinished:
            number, event = self._ended.get()
            if event.finish_reason not in ("stop", "length"):
                raise EngineError(f"a conversation was not written to its end: {event.error or event.finish_reason}")
            unfinished -= not self._advance(number, drafts[number])
        return [
            Conversation(
                np.array(draft.token_ids, dtype=np.int32), np.array(draft.is_answer), draft.plan.answer_temperature == 0
            )
            for draft in drafts
            if any(draft.is_answer)
        ]

    def _begin(self, number: int, draft: _Draft) -> bool:
        """Ask for what follows the user's first words, if any are given; False where there is no room for it."""
        plan = draft.plan
        draft.add(self._frame.before_user, False)
        words = plan.text if plan.text is not None else (plan.opening or "").rstrip(" ")
        draft.add(self._tokenizer.encode(words)[: self._max_length // 2], False)
        if plan.text is not None:
            draft.add(self._frame.before_answer, False)
            draft.answering = True
        return self._submit(number, draft)

    def _submit(self, number: int, draft: _Draft) -> bool:
        plan = draft.plan
        most = _MAX_ANSWER_TOKENS if draft.answering else _MAX_USER_TOKENS
        # A user's words must leave room for some of an answer.
        room = self._max_length - len(draft.token_ids) - (0 if draft.answering else self._max_length // 4)
        if room < 1:
            return False
        sampling = SamplingParams(
            temperature=plan.answer_temperature if draft.answering else plan.user_temperature,
            seed=plan.seed + 2 * draft.turns_done + draft.answering,
            max_tokens=min(most, room),
            min_tokens=1,
        )
        new = draft.new = []

        def on_event(event: StreamEvent) -> None:
            new.extend(event.token_ids)
            if event.finish_reason is not None:
                self._ended.put((number, event))

        self._host.submit(f"{number}-{draft.turns_done}-{int(draft.answering)}", draft.token_ids, sampling, on_event)
        return True

    def _advance(self, number: int, draft: _Draft) -> bool:
        """Take what was written, and ask for the next part; False where there is none."""
        new, frame, ends = draft.new, self._frame, self._tokenizer.eos_token_ids
        if not draft.answering:
            draft.add(new[:-1] if new[-1] in ends else new, False)
            draft.add(frame.before_answer, False)
            draft.answering = True
            return self._submit(number, draft)
        looping = loop_at_end(new)
        if looping > _LOOP_TOKENS:
            draft.add(new[: len(new) - looping + _LOOP_TOKENS], True)
            return False
        draft.add(new, True)
        draft.turns_done += 1
        room_for_more = len(draft.token_ids) + len(frame.between) < self._max_length // 2
        if draft.turns_done == draft.plan.num_turns or not room_for_more:
            return False
        # The end of the turn is the answer's last token already, unless the answer was cut.
        between = frame.between[1:] if draft.token_ids[-1] == frame.between[0] else frame.between
        draft.add(between, False)
        draft.answering = False
        return self._submit(number, draft)
