"""Conversations to train on: how they lie on disk, which tokens a head can draft, and how batches are cut of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend.errors import ConfigError

HELD_OUT_EVERY = 20  # conversations: one of so many is never trained on
_POOL = 64  # batches that are cut of conversations sorted by length together
_LENGTH_STEP = 64  # tokens to which batches are padded: fewer shapes


@dataclass(frozen=True, slots=True)
class Conversation:
    """
    Attributes:
        token_ids: int32 [length].
        is_answer: bool [length], of the tokens that the target would have to generate, their end-of-sequence included.
        is_greedy: whether the answers were chosen greedily.
    """

    token_ids: NDArray[np.int32]
    is_answer: NDArray[np.bool_]
    is_greedy: bool

    def answers(self) -> list[tuple[int, int]]:
        """First and end position of each answer."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self.is_answer, [False])).astype(np.int8)))
        return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


@dataclass(frozen=True, slots=True)
class Batch:
    """
    Attributes:
        token_ids: int64 [num_sequences, length], zeros behind each sequence's end.
        places: int64 [num_places], of tokens in the flattened batch whose next one is an answer's: there the target's
            distribution is learnt. None lies within the first `margin` tokens of its sequence.
    """

    token_ids: NDArray[np.int64]
    places: NDArray[np.int64]


def split_held_out(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Those to train on, and those held out. Raises `ConfigError` where one of the two would be empty."""
    held_out = [conversation for index, conversation in enumerate(conversations) if index % HELD_OUT_EVERY == 0]
    training = [conversation for index, conversation in enumerate(conversations) if index % HELD_OUT_EVERY]
    if not training:
        raise ConfigError(f"{len(conversations)} conversations are too few to train on; two are the least")
    return training, held_out


def count_answer_tokens(conversations: Sequence[Conversation], vocab_size: int) -> NDArray[np.int64]:
    """How often each token is in an answer, [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for conversation in conversations:
        counts += np.bincount(conversation.token_ids[conversation.is_answer], minlength=vocab_size)
    return counts


def choose_draft_vocabulary(counts: NDArray[np.int64], size: int, always: Sequence[int]) -> NDArray[np.int64]:
    """The `size` most frequent tokens (all, where there are no more), the lowest ids among equals, in ascending order.

    Args:
        counts: of `count_answer_tokens`.
        always: ids to take whatever their frequency.
    """
    ranked = counts.copy()
    ranked[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def coverage(counts: NDArray[np.int64], token_ids: NDArray[np.int64]) -> float:
    """The share of the counted tokens that are among `token_ids`; 1 where none was counted."""
    total = int(counts.sum())
    return int(counts[token_ids].sum()) / total if total else 1.0


def batches(
    conversations: Sequence[Conversation], batch_tokens: int, margin: int, seed: int, first: int = 0
) -> Iterator[Batch]:
    """Endless, from batch number `first` on; each epoch has all conversations once, in an order of its own.

    A batch holds conversations of similar length, padded to the longest, so that no attention mask is needed.

    Args:
        batch_tokens: with padding; a longer conversation is a batch of its own.
        margin: tokens ahead that a head predicts: no place may lie nearer to its sequence's start.
    """
    usable = [conversation for conversation in conversations if conversation.is_answer[margin + 1 :].any()]
    lengths = np.array([len(conversation.token_ids) for conversation in usable])
    number = 0
    for epoch in _count():
        for chosen in _plan_epoch(lengths, batch_tokens, np.random.default_rng([seed, epoch])):
            if number >= first:
                yield _make_batch([usable[index] for index in chosen], margin)
            number += 1


def _count() -> Iterator[int]:
    epoch = 0
    while True:
        yield epoch
        epoch += 1


def _plan_epoch(
    lengths: NDArray[np.int64], batch_tokens: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Indices of the conversations of each batch."""
    order = generator.permutation(len(lengths))
    pool_size = max(1, int(_POOL * batch_tokens / max(1.0, float(lengths.mean()))))
    plan = []
    for start in range(0, len(order), pool_size):
        pool = order[start : start + pool_size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        begin = 0
        for end in range(1, len(pool) + 1):
            if end == len(pool) or _padded(int(lengths[pool[end]])) * (end + 1 - begin) > batch_tokens:
                plan.append(pool[begin:end])
                begin = end
    return [plan[index] for index in generator.permutation(len(plan))]


def _padded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _make_batch(conversations: Sequence[Conversation], margin: int) -> Batch:
    length = _padded(max(len(conversation.token_ids) for conversation in conversations))
    token_ids = np.zeros((len(conversations), length), dtype=np.int64)
    is_place = np.zeros((len(conversations), length), dtype=bool)
    for row, conversation in enumerate(conversations):
        token_ids[row, : len(conversation.token_ids)] = conversation.token_ids
        is_place[row, : len(conversation.token_ids) - 1] = conversation.is_answer[1:]
    is_place[:, :margin] = False
    return Batch(token_ids, np.flatnonzero(is_place))
