"""Drafts that are as right as a test wants them, in a real engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from backend.engine.engine_host import EngineHost
from backend.spec_decode.proposer import DraftOutput, DraftRequest
from tests.engine.driving import config_of

# Of a request's n-th round, in which at most so many tokens may be drafted: how many are, and how many of them are right.
Plan = Callable[[str, int, int], tuple[int, int]]


class ScriptedProposer:
    """Knows how each prompt goes on, and drafts that, with a wrong token behind as many right ones as the plan says.

    Args:
        scripts: whole texts, prompt and continuation.
    """

    def __init__(self, scripts: Sequence[Sequence[int]], plan: Plan) -> None:
        self._scripts = [list(script) for script in scripts]
        self._plan = plan
        self._texts: dict[str, list[int]] = {}
        self._rounds: Counter[str] = Counter()
        self.drafted: list[tuple[str, int, int]] = []  # request, drafted, right ones

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._texts[request_id] = list(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id] += token_ids

    def text(self, request_id: str) -> list[int]:
        return self._texts[request_id]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """There is nothing to compute."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        drafts = [self._draft(request) for request in requests]
        k = max(map(len, drafts))
        padded = torch.tensor([draft + [0] * (k - len(draft)) for draft in drafts], dtype=torch.int64)
        return DraftOutput(padded.view(len(drafts), k), [len(draft) for draft in drafts])

    def _draft(self, request: DraftRequest) -> list[int]:
        text = self._texts[request.request_id]
        script = next(script for script in self._scripts if script[: len(text)] == text)
        count, num_right = self._plan(request.request_id, self._rounds[request.request_id], request.max_tokens)
        self._rounds[request.request_id] += 1
        following = script[len(text) : len(text) + count]
        self.drafted.append((request.request_id, len(following), min(num_right, len(following))))
        return [token_id if index < num_right else (token_id + 1) % 256 for index, token_id in enumerate(following)]


def at_random(seed: int) -> Plan:
    rng = random.Random(seed)

    def plan(_: str, number: int, most: int) -> tuple[int, int]:
        count = rng.randint(0, most)
        return count, rng.randint(0, count)

    return plan


def in_turn(*rounds: tuple[int, int]) -> Plan:
    """As listed; the last one for all that follow."""

    def plan(_: str, number: int, most: int) -> tuple[int, int]:
        count, num_right = rounds[min(number, len(rounds) - 1)]
        return min(most, count), num_right

    return plan


@contextmanager
def scripted(
    host: EngineHost, model: object, scripts: Sequence[Sequence[int]], plan: Plan, **overrides: Any
) -> Iterator[ScriptedProposer]:
    """An engine that speculates with a `ScriptedProposer`, which is asked for every draft; it is gone afterwards."""
    proposer = ScriptedProposer(scripts, plan)

    def make(n_min: int, n_max: int) -> ScriptedProposer:
        return proposer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backend.worker.speculative_runner.NgramProposer", make)
        patch.setattr("backend.core.scheduler_factory.LOOK_UP_METHODS", ())
        host.unload()
        host.load(config_of(model, speculative__method="ngram", **overrides))
    try:
        yield proposer
    finally:
        host.unload()


def whole(prompts: Mapping[str, Sequence[int]], outputs: Mapping[str, Sequence[int]]) -> list[list[int]]:
    return [[*prompts[key], *outputs[key]] for key in prompts]
