"""Draft trees in the scheduler: tokens are those of plain decoding, and nodes get slots and budget that nobody else needs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from backend.core.draft_cost import DraftCost
from backend.core.draft_length import AdaptiveLength
from backend.core.speculative_scheduler import MAX_TREE_REQS
from backend.spec_decode.draft_tree import DEFAULT_TREES
from tests.core.paged_machine import generate
from tests.core.speculative_machine import SpeculativeLab
from tests.core.test_async_scheduling import prompt_of
from tests.core.test_draft_length import request_with, verify_cost
from tests.core.test_speculative_scheduler import PROMPTS, SETTINGS

TREE = DEFAULT_TREES["eagle"]
NODES = TREE.num_drafted_to


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_plain_decoding(name: str, seed: int) -> None:
    options = SETTINGS[name]
    lab = SpeculativeLab(seed=seed, tree=True, **options)
    for key, prompt in PROMPTS.items():
        lab.add(key, prompt, max_tokens=20)
    windows = options.get("windows", (None,))
    assert lab.run() == {key: generate(prompt, 20, windows=windows) for key, prompt in PROMPTS.items()}
    assert set(lab.finished.values()) == {"length"}
    assert bool(lab.machine.rounds) == (name != "a budget of one")


@pytest.mark.parametrize("num_blocks", [200, 40])
def test_blocks_of_a_tree_stay_for_the_next_one_that_is_drafted_ahead(num_blocks: int) -> None:
    """As long as the pool has one for everybody: else they go back, and nobody is preempted for them."""
    labs = [
        SpeculativeLab(seed=3, tree=True, drafts_ahead=ahead, block_size=4, num_blocks=num_blocks, max_model_len=60)
        for ahead in (False, True)
    ]
    for lab in labs:
        requests = [lab.add(str(index), prompt_of(7, index), max_tokens=24) for index in range(4)]
        assert lab.run() == {str(index): generate(prompt_of(7, index), 24) for index in range(4)}
        assert [request.num_preemptions for request in requests] == [0] * 4, "40 blocks hold four requests of 31 tokens"
    without, ahead = (sum(len(step.num_kept_blocks or {}) for step in lab.steps) for lab in labs)
    assert ahead < without / 2 if num_blocks == 200 else without > 0


@pytest.mark.parametrize("adaptive", [False, True])
def test_trees_are_off_where_graphs_do_not_take_them(adaptive: bool) -> None:
    """Only where speculation may be off by itself."""
    lab = SpeculativeLab(
        tree=True, drafts_ahead=True, num_blocks=999, max_num_seqs=20, max_num_batched_tokens=600, adaptive=adaptive
    )
    for index in range(MAX_TREE_REQS + 1):
        lab.add(str(index), prompt_of(5, index), max_tokens=6 + 20 * (index > 0))
    lab.run()
    rounds = [(len(step.num_scheduled_tokens), bool(step.num_draft_tokens)) for step in lab.steps[1:]]
    assert {drafts for count, drafts in rounds if count > MAX_TREE_REQS} == {not adaptive}
    assert adaptive or any(drafts for count, drafts in rounds if count <= MAX_TREE_REQS)


def test_random_traffic() -> None:
    """Prompts that begin alike, over pools that are too small for all, stops anywhere on an accepted path."""
    for seed in range(25):
        rng = random.Random(seed)
        lab = SpeculativeLab(
            seed=seed,
            tree=True,
            num_blocks=rng.randint(12, 40),
            block_size=rng.choice([1, 2, 4]),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice([2, 9, 30, 90]),
            num_speculative_tokens=rng.randint(1, 5),
            prefix_caching=rng.random() < 0.5,
            swap_blocks=rng.choice([0, 0, 20]),
            drafts_ahead=seed % 2 == 0,
        )
        shared = prompt_of(lab.scheduler.max_model_len // 3, 5)
        expected = {}
        for index in range(rng.randint(1, 9)):
            prompt = shared[: rng.randint(1, len(shared))] + prompt_of(rng.randint(0, 4), index)
            whole = generate(prompt, 12)
            stop = rng.choice(whole)
            request = lab.add(str(index), prompt, 12, eos_token_ids=frozenset([stop]))
            room = request.max_num_tokens - len(prompt)
            expected[str(index)] = whole[: min(whole.index(stop), room)]
        assert lab.run() == expected, seed


def test_a_tree_is_cut_to_what_there_is_room_for() -> None:
    """Levels to the request's own end; nodes to the budget's share and the end of the context."""
    lab = SpeculativeLab(num_blocks=400, max_model_len=64, tree=True)
    lab.machine.rng.random = lambda: 1.0  # type: ignore[method-assign]  # nothing is accepted
    lab.add("a", prompt_of(9), max_tokens=8)
    assert lab.run()["a"] == generate(prompt_of(9), 8)
    counts = [NODES[min(5, left)] for left in range(6, 0, -1)]
    assert counts == [25, 25, 24, 19, 12, 5]
    assert [step.num_draft_tokens for step in lab.steps] == [None, *({"a": count} for count in counts), None]
    lab.add("end", prompt_of(40), max_tokens=100)
    begin = len(lab.steps)
    assert lab.run()["end"] == generate(prompt_of(40), 24)
    granted = [(step.num_draft_tokens or {}).get("end", 0) for step in lab.steps[begin + 1 :]]
    rooms = [min(64 - length, NODES[min(5, 64 - length - 1)]) for length in range(41, 64)]
    assert granted == rooms
    assert 22 in rooms  # a part of a level
    for key in "bcd":
        lab.add(key, prompt_of(3, ord(key)), max_tokens=10)
    begin = len(lab.steps)
    lab.run()
    assert lab.steps[begin + 1].num_draft_tokens == {"b": 21, "c": 20, "d": 20}, "61 are left beside their tokens"


@pytest.mark.parametrize("draft", [0.0, 0.1])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_depth_is_the_one_with_the_most_tokens_per_time(device: str, batch_size: int, draft: float) -> None:
    """A level costs a draft, and each of its nodes a verification."""
    verify = verify_cost(batch_size, *{"cpu": (0.22, 0.0), "cuda": (0.005, 0.025)}[device])
    length = AdaptiveLength(TREE.depth, DraftCost(draft, device), NODES)
    depths = []
    for rate in (0.0, 0.3, 0.6, 0.8, 0.95, 1.0):
        speedups = [
            sum(rate**n for n in range(depth + 1)) / (1 + draft * depth + verify * NODES[depth]) for depth in range(6)
        ]
        (chosen,) = set(length.limits([request_with(rate)] * batch_size))
        assert speedups[chosen] == pytest.approx(max(speedups))
        depths.append(chosen)
    assert all(before <= after for before, after in pairwise(depths))
    assert (depths[-1] > 0) == (device == "cuda" and batch_size < 64), "a CPU computes every node"
    assert AdaptiveLength(TREE.depth, DraftCost(0.0, "cpu"), NODES).pays_at_first() is False
    assert AdaptiveLength(TREE.depth, DraftCost(0.0, "cuda"), NODES).pays_at_first() is True
