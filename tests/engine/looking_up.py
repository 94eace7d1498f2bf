"""Drafts from the text, in a real engine whose graphs are stand-ins for CUDA's or CUDA's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.metrics.speculation_ledger import Round
from backend.spec_decode.ngram import NgramText
from tests.engine.driving import Answer
from tests.engine.few_tokens import VOCAB_SIZE
from tests.engine.scripted import make_scripted
from tests.spec_decode.tiny_heads import random_ids

GREEDY: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
OPTIONS: dict[str, Any] = {
    "speculative__method": "ngram",
    "model__max_model_len": 96,
    "scheduler__max_num_seqs": 5,
    "scheduler__async_scheduling": True,
}
# Of few different tokens, as what comes behind them: much of it has been there before.
PROMPTS = {f"p{length}": random_ids(VOCAB_SIZE, length, seed=length).tolist() for length in (1, 2, 15, 17, 40)}
CIRCLE = list(range(10, 50))


def make_circling(folder: Path) -> Path:
    """A model that goes round in circles, from any of their tokens on."""
    return make_scripted(folder, [[*CIRCLE, CIRCLE[0]]])


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rounds are begun and, without the host, gone on with."""
    from backend.worker.graph_rounds import GraphRounds  # once the kernels are the interpreter's

    calls: Counter[str] = Counter()
    for name in ("run", "repeat"):
        original = getattr(GraphRounds, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(GraphRounds, name, counted)
    return calls


def circle(begin: int, length: int) -> list[int]:
    """Part of a text that repeats itself."""
    return [CIRCLE[(begin + index) % len(CIRCLE)] for index in range(length)]


def check_drafts(
    prompts: Mapping[str, Sequence[int]], collected: Mapping[str, Answer], rounds: Sequence[Round], n_min: int = 1
) -> None:
    """Each is what the text says that was there."""
    texts = {key: [*prompt, *collected[key].token_ids] for key, prompt in prompts.items()}
    for it in rounds:
        index = NgramText(texts[it.request_id][: len(prompts[it.request_id]) + it.position], n_min, 3)
        assert list(it.draft_token_ids) == index.continuation(len(it.draft_token_ids)), it
        assert set(it.draft_probs) == {1.0}
