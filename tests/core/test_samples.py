"""Samples of one prompt: each gets the tokens of a request by itself, and the prompt is computed once.

The machine's next token depends on everything before it and on the seed, read back through the block tables, so a block
that two samples write to shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from backend.request import sample_ids
from backend.sampling_params import sample_seed
from tests.core.paged_machine import VOCAB, Lab, generate

SEED = 5


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


def expected_of(key: str, prompt: Sequence[int], max_tokens: Sequence[int], seed: int = SEED) -> dict[str, list[int]]:
    """Each sample by itself, from the list alone."""
    return {
        sample_id: generate(prompt, count, sample_seed(seed, index))
        for index, (sample_id, count) in enumerate(zip(sample_ids(key, len(max_tokens)), max_tokens, strict=True))
    }


def num_run(lab: Lab, key: str) -> int:
    return sum(step.num_scheduled_tokens.get(key, 0) for step in lab.steps)


def num_copies(lab: Lab) -> int:
    return sum(len(step.block_copies) for step in lab.steps)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 33])
def test_the_prompt_is_computed_once(length: int, block_size: int, ahead: int, prefix_caching: bool) -> None:
    """The others run its last token only, and hold the blocks before that one together with the first."""
    lab = Lab(num_blocks=400 // block_size, block_size=block_size, ahead=ahead, prefix_caching=prefix_caching)
    prompt, counts = prompt_of(length), [6, 9, 3, 7]
    requests = lab.add_samples("a", prompt, 4, counts, seed=SEED)
    lab.step()
    lab.step()
    assert [request.status for request in requests] == ["running"] * 4
    held = [lab.manager.snapshot().block_ids[request.request_id][0] for request in requests]
    num_shared = (length - 1) // block_size
    for index in range(num_shared):
        assert {blocks[index] for blocks in held} == {held[0][index]}
        assert lab.manager.pool.ref_cnt(held[0][index]) == 4
    own = [block for blocks in held for block in blocks[num_shared:]]
    assert len(set(own)) == len(own), "a block that is still written to belongs to one"
    lab.run()
    assert lab.tokens == expected_of("a", prompt, counts)
    assert [num_run(lab, request.request_id) for request in requests] == [length + 5, 1 + 8, 1 + 2, 1 + 6]
    assert num_copies(lab) == (3 if (length - 1) % block_size else 0)
    assert not requests[1].num_cached_tokens, "a prompt is looked up once"


def test_nothing_of_it_where_there_is_one_sample() -> None:
    lab = Lab()
    (request,) = lab.add_samples("a", prompt_of(9), 1, [4], seed=SEED)
    assert (request.request_id, request.samples) == ("a", None)
    lab.run()
    assert lab.tokens == {"a": generate(prompt_of(9), 4, SEED)}
    assert num_copies(lab) == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_what_the_first_one_has_computed_outlives_it(max_num_seqs: int, ahead: int, prefix_caching: bool) -> None:
    """All end at their first token, or there is a slot for one at a time: still, the prompt is computed once."""
    lab = Lab(max_num_seqs=max_num_seqs, ahead=ahead, prefix_caching=prefix_caching)
    prompt = prompt_of(22)
    requests = lab.add_samples("a", prompt, 6, [1] * 6, seed=SEED)
    other = lab.add("b", prompt_of(3, 1), 5)
    lab.run()
    assert lab.tokens == expected_of("a", prompt, [1] * 6) | {"b": generate(prompt_of(3, 1), 5)}
    assert sum(num_run(lab, request.request_id) for request in requests) == 22 + 5
    assert num_run(lab, other.request_id) == 3 + 4


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_first_one_is_aborted_at_any_step(ahead: int, at: int) -> None:
    """In the middle of a prompt of five chunks, or later: the next one goes on from there."""
    lab = Lab(max_num_batched_tokens=5, ahead=ahead)
    prompt, counts = prompt_of(22), [9, 5, 4]
    requests = lab.add_samples("a", prompt, 3, counts, seed=SEED)
    for _ in range(at):
        lab.step()
    computed = min(requests[0].num_computed_tokens, 21)
    lab.abort("a/0")
    lab.run()
    expected = expected_of("a", prompt, counts)
    assert lab.tokens == expected | {"a/0": expected["a/0"][: len(lab.tokens["a/0"])]}
    ran = [num_run(lab, request.request_id) for request in requests]
    forked = at > 5  # by then the others had begun
    assert sorted(ran[1:]) == sorted([1 + 4, 1 + 3] if forked or computed == 21 else [22 - computed + 4, 1 + 3])


@pytest.mark.parametrize("at", range(6))
def test_all_are_aborted(at: int) -> None:
    lab = Lab(max_num_batched_tokens=9, max_num_seqs=2, ahead=1)
    lab.add_samples("a", prompt_of(14), 4, [9, 1, 4, 4], seed=SEED)
    for _ in range(at):
        lab.step()
    for key in list(lab.scheduler.requests):
        lab.abort(key)
        lab.manager.check_integrity()
    assert lab.manager.pool.num_referenced_blocks == 0
    lab.run()
    assert set(lab.finished) == set(sample_ids("a", 4))


def test_a_damaged_sample_leaves_nothing_behind() -> None:
    lab = Lab(prefix_caching=True)
    prompt = prompt_of(14)
    requests = lab.add_samples("a", prompt, 2, [3, 3], seed=SEED)
    lab.fail_at["a/0"] = 14
    lab.run()
    assert lab.finished == {"a/0": "error", "a/1": "length"}
    assert num_run(lab, requests[1].request_id) == 14 + 2


def test_others_go_first_while_the_prompt_is_computed() -> None:
    """A sample that waits for the first one's prompt does not stand in the way of who came after it."""
    lab = Lab(max_num_batched_tokens=8, max_num_seqs=3)
    lab.add_samples("a", prompt_of(40), 2, [2, 2], seed=SEED)
    lab.add("b", prompt_of(4, 1), 2)
    lab.step()
    assert [request.request_id for request in lab.scheduler.running] == ["a/0", "b"]
    lab.run()
    assert lab.tokens == expected_of("a", prompt_of(40), [2, 2]) | {"b": generate(prompt_of(4, 1), 2)}


def test_what_waits_with_blocks_gives_them_up_for_who_needs_them() -> None:
    """One slot; the heir of the prompt's blocks has to let a better request have them, and nothing stands still."""
    lab = Lab(num_blocks=6, block_size=4, max_num_seqs=1, policy="priority")
    prompt = prompt_of(21)
    requests = lab.add_samples("a", prompt, 2, [1, 2], seed=SEED)
    lab.step()
    assert requests[1].num_computed_tokens == 20, "it waits with what the first one has left"
    lab.add("b", prompt_of(10, 1), 9, priority=-1)
    lab.run()
    assert lab.tokens == expected_of("a", prompt, [1, 2]) | {"b": generate(prompt_of(10, 1), 9)}
    assert num_run(lab, "a/1") == 21 + 1


@pytest.mark.parametrize("layout", ["contiguous", "none"])
def test_a_layout_that_shares_nothing_computes_each_alone(layout: str) -> None:
    lab = Lab(layout=layout, num_blocks=64, max_model_len=40)
    prompt, counts = prompt_of(13), [5, 4, 6]
    lab.add_samples("a", prompt, 3, counts, seed=SEED)
    lab.run()
    assert lab.tokens == expected_of("a", prompt, counts)
    assert num_copies(lab) == 0
    assert [num_run(lab, key) for key in sample_ids("a", 3)][1] >= 13 + 3


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first", "priority"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("swap_blocks", [0, 4, 100])
def test_random_traffic(swap_blocks: int, ahead: int, prefix_caching: bool, batching: str, policy: str) -> None:
    """Small pools and budgets, so that samples are preempted, cut into chunks, and wait for slots; aborts at any time."""
    rng = random.Random(f"{swap_blocks}/{policy}")
    preempted = copies = 0
    for num_blocks, block_size, max_num_seqs in ((10, 4, 4), (14, 2, 8), (12, 4, 1), (40, 2, 8)):
        lab = Lab(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice([2, 5, 64]),
            ahead=ahead,
            prefix_caching=prefix_caching,
            batching=batching,
            policy=policy,
            swap_blocks=swap_blocks,
        )
        expected: dict[str, list[int]] = {}
        stem = prompt_of(9)
        for index in range(8):
            prompt = stem[: rng.choice([0, 4, 9])] + prompt_of(rng.randint(1, 9), index)
            limit = lab.scheduler.max_model_len - len(prompt)
            counts = [min(rng.choice([1, 1, 4, 20]), limit) for _ in range(rng.choice([1, 2, 5]))]
            lab.add_samples(str(index), prompt, len(counts), counts, seed=index)
            expected |= expected_of(str(index), prompt, counts, index)
            for _ in range(rng.choice([0, 1, 3, 9])):
                if lab.scheduler.has_unfinished_requests():
                    lab.step()
                if lab.scheduler.requests and rng.random() < 0.1:
                    lab.abort(rng.choice(list(lab.scheduler.requests)))
                lab.manager.check_integrity()
        lab.run()
        for key, reason in lab.finished.items():
            whole = len(expected[key]) if reason == "length" else len(lab.tokens[key])
            assert lab.tokens[key] == expected[key][:whole]
        assert lab.finished.keys() == expected.keys()
        preempted += sum(len(step.preempted_request_ids) for step in lab.steps)
        copies += num_copies(lab)
    assert copies
    assert preempted or batching == "static"
