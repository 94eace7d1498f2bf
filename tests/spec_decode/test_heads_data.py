"""Conversations on disk and in batches, the draft vocabulary, and loops, each against a plain count."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from backend.errors import ConfigError, ModelError
from backend.spec_decode.heads.data_folder import DataFolder
from backend.spec_decode.heads.loops import MAX_PERIOD, MIN_REPEATED, in_loop, loop_at_end
from backend.spec_decode.heads.training_data import (
    HELD_OUT_EVERY,
    Conversation,
    batches,
    choose_draft_vocabulary,
    count_answer_tokens,
    coverage,
    split_held_out,
)

MADE_BY = {"seed": 0, "texts": None}


def conversations(number: int, seed: int = 0, most: int = 150, vocab_size: int = 40) -> list[Conversation]:
    """Of any length, with two answers at most; token 0 is the conversation's number from 1."""
    generator = np.random.default_rng(seed)
    made = []
    for index in range(number):
        token_ids = generator.integers(1, vocab_size, generator.integers(12, most)).astype(np.int32)
        token_ids[0] = index + 1
        edges = np.sort(generator.integers(1, len(token_ids) + 1, 3))
        is_answer = np.zeros(len(token_ids), dtype=bool)
        is_answer[edges[0] : edges[1]] = is_answer[edges[2] :] = True
        made.append(Conversation(token_ids, is_answer, bool(index % 2)))
    return made


def test_answers_are_the_runs_of_marked_tokens() -> None:
    marked = [False, True, True, False, True]
    assert Conversation(np.zeros(5, np.int32), np.array(marked), True).answers() == [(1, 3), (4, 5)]
    assert Conversation(np.zeros(2, np.int32), np.array([False, False]), True).answers() == []


@pytest.mark.parametrize("largest_id", [39, 2**16])
def test_a_folder_gives_back_what_was_written(tmp_path: Path, largest_id: int) -> None:
    written = [conversations(5, seed=0), conversations(3, seed=1)]
    written[1][0].token_ids[1] = largest_id
    folder = DataFolder(tmp_path / "data", MADE_BY)
    for part in written:
        folder.append(part)
    again = DataFolder(tmp_path / "data", MADE_BY)
    sizes = [sum(len(each.token_ids) for each in part) for part in written]
    assert (again.num_parts, again.num_tokens) == (2, sum(sizes))
    read = again.read(again.num_tokens)
    for found, expected in zip(read, [*written[0], *written[1]], strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.is_answer.tolist() == expected.is_answer.tolist()
        assert found.is_greedy == expected.is_greedy
    assert len(again.read(sizes[0])) == 5, "a training that wants fewer tokens than are there sees the same as before"


def test_a_folder_of_another_making_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    DataFolder(tmp_path, MADE_BY).append(conversations(2))
    with pytest.raises(ConfigError, match="another seed"):
        DataFolder(tmp_path, MADE_BY | {"seed": 1})
    (tmp_path / "conversations-0000.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="damaged"):
        DataFolder(tmp_path, MADE_BY)


def test_some_are_held_out_and_none_of_them_trained_on() -> None:
    made = conversations(2 * HELD_OUT_EVERY + 1)
    training, held_out = split_held_out(made)
    assert [each.token_ids[0] for each in held_out] == [1, HELD_OUT_EVERY + 1, 2 * HELD_OUT_EVERY + 1]
    assert {each.token_ids[0] for each in training} == set(range(1, len(made) + 1)) - {
        each.token_ids[0] for each in held_out
    }
    with pytest.raises(ConfigError, match="two are the least"):
        split_held_out(made[:1])


def test_each_epoch_has_every_conversation_once() -> None:
    made, margin, batch_tokens = conversations(50), 4, 512
    usable = [each for each in made if each.is_answer[margin + 1 :].any()]
    assert len(usable) < len(made), "one has nothing to learn from"
    seen: Counter[int] = Counter()
    shapes = set()
    for batch in batches(made, batch_tokens, margin, seed=0):
        number_of = [int(row[0]) - 1 for row in batch.token_ids]
        seen.update(number_of)
        shapes.add(batch.token_ids.shape)
        assert batch.token_ids.size <= batch_tokens
        expected = []
        for row, number in enumerate(number_of):
            conversation, length = made[number], len(made[number].token_ids)
            assert batch.token_ids[row, :length].tolist() == conversation.token_ids.tolist()
            assert not batch.token_ids[row, length:].any()
            places = [at for at in range(margin, length - 1) if conversation.is_answer[at + 1]]
            expected += [row * batch.token_ids.shape[1] + place for place in places]
        assert batch.places.tolist() == expected
        if sum(seen.values()) == 3 * len(usable):
            break
        assert sum(seen.values()) < 3 * len(usable)
    assert set(seen.values()) == {3}
    assert len(shapes) > 1


def test_batches_go_on_from_any_number_and_follow_the_seed() -> None:
    made = conversations(50)
    whole = [batch.token_ids.tolist() for batch in islice(batches(made, 512, 4, seed=0), 40)]
    later = [batch.token_ids.tolist() for batch in islice(batches(made, 512, 4, seed=0, first=23), 17)]
    assert later == whole[23:]
    assert [batch.token_ids.tolist() for batch in islice(batches(made, 512, 4, seed=1), 40)] != whole


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_answers() -> None:
    made = conversations(30)
    counter = Counter(int(id) for each in made for id in each.token_ids[each.is_answer])
    counts = count_answer_tokens(made, 40)
    assert {id: int(count) for id, count in enumerate(counts) if count} == dict(counter)
    rare = min(range(40), key=lambda id: (counter[id], -id))
    chosen = choose_draft_vocabulary(counts, 10, [rare])
    frequent = sorted([*sorted(range(40), key=lambda id: (-counter[id], id))[:9], rare])
    assert chosen.tolist() == frequent
    assert coverage(counts, chosen) == pytest.approx(sum(counter[id] for id in frequent) / sum(counter.values()))
    assert choose_draft_vocabulary(counts, 1000, [rare]).tolist() == list(range(40))
    assert coverage(np.zeros(40, np.int64), chosen) == 1.0


def loops_by_definition(token_ids: list[int]) -> list[bool]:
    marked = [False] * len(token_ids)
    for period in range(1, MAX_PERIOD + 1):
        for first in range(period, len(token_ids)):
            end = first
            while end < len(token_ids) and token_ids[end] == token_ids[end - period]:
                end += 1
            if end - first >= max(2 * period, MIN_REPEATED):
                marked[first:end] = [True] * (end - first)
    return marked


def test_loops_are_found_where_they_are() -> None:
    generator = np.random.default_rng(0)
    text = generator.integers(0, 1000, 40).tolist()
    assert not any(in_loop(text))
    assert in_loop(text + [5, 6, 7] * 8) == [False] * 43 + [True] * 21, "the first turn repeats nothing"
    assert not any(in_loop(text + [5, 6, 7] * 6)), "15 repeated tokens are too few"
    assert not any(in_loop(text + text)), "said twice is no loop"
    assert in_loop(text * 3) == [False] * 40 + [True] * 80
    assert in_loop([]) == []
    for length in (1, 60, 100):
        for alphabet in (1, 2, 3):
            drawn = generator.integers(0, alphabet, length).tolist()
            marked = in_loop(drawn)
            assert marked == loops_by_definition(drawn)
            assert (loop_at_end(drawn) > 0) == marked[-1]
    assert loop_at_end([*text, *[5, 6, 7] * 8]) == 21
    assert loop_at_end([*text, *[5, 6, 7] * 8, 5, 9]) == 0
    assert loop_at_end([5] * 30) == 29
    assert loop_at_end([]) == 0
