"""What earlier runs left in the cache: against a naive pool that has seen all runs, and case by case."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from backend.analysis.earlier_blocks import EarlierBlocks
from backend.analysis.prefix_cache import EarlierRuns, PrefixCache
from backend.analysis.prefix_words import fate_sentences
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.prefix_history import PrefixHistory
from backend.request import Request
from tests.core.paged_machine import VOCAB
from tests.metrics.prefix_traffic import WatchedLab, tokens_of

NUM_RUNS = 4


@dataclass
class Runs:
    """Several runs on one pool, each with a ledger of its own, as an engine that gets another sink."""

    lab: WatchedLab
    readers: list[LedgerReader] = field(default_factory=list)
    requests: list[list[str]] = field(default_factory=list)  # ids of each run

    def end_run(self) -> None:
        known = [key for keys in self.requests for key in keys]
        self.lab.run()
        self.readers.append(self.lab.reader())
        self.requests.append([key for key in self.lab.asked if key not in known])
        self.lab.chunks, self.lab.num_steps = [], 0
        self.lab.manager.log_events(True)

    def cache(self, first: int = 0, last: int = -1) -> PrefixCache:
        """The analysis of run `last` with the runs from `first` on before it."""
        last %= len(self.readers)
        blocks, history = EarlierBlocks(), PrefixHistory(self.lab.block_size)
        for place in range(first, last):
            assert blocks.take(self.readers[place]) == [key for key in self.lab.lookups if key in self.requests[place]]
        blocks.extend(self.readers[last])
        assert history.extend(self.readers[last])
        earlier = [key for keys in self.requests[first:last] for key in keys]
        return PrefixCache(
            history,
            {key: tokens_of(self.lab.asked[key]) for key in self.requests[last]},
            EarlierRuns(blocks.lives, {key: tokens_of(self.lab.asked[key]) for key in earlier}),
        )


def common(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def random_runs(seed: int) -> Runs:
    """Prompts over a few stems, in pools that evict; the last run begins warm."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    lab = WatchedLab(block_size=size, num_blocks=120 // size, max_num_seqs=4, max_num_batched_tokens=24)
    runs, stems = Runs(lab), [rng.choices(range(VOCAB), k=24) for _ in range(4)]
    for run in range(NUM_RUNS):
        for index in range(12):
            stem = rng.choice(stems)
            prompt = stem[: rng.randint(1, len(stem))] + rng.choices(range(3), k=rng.randint(0, 6))
            lab.add(f"run{run}-{index}", prompt, max_tokens=rng.choice([1, 3, 9]))
            for _ in range(rng.choice([0, 2, 4])):
                if lab.scheduler.has_unfinished_requests():
                    lab.step()
        runs.end_run()
    return runs


@pytest.mark.parametrize("seed", range(8))
def test_a_warm_run_is_told_what_a_pool_tells_that_has_seen_all_runs(seed: int) -> None:
    runs = random_runs(seed)
    lab, size, cache = runs.lab, runs.lab.block_size, runs.cache()
    for key in runs.requests[-1]:
        request, lookup, fate = lab.asked[key], lab.lookups[key], cache.fate(key)
        assert fate.num_cached_tokens == lookup.found * size
        assert fate.knows_all
        assert len(fate.providers) >= (lookup.found > 0), "found blocks have a name"
        for provider in fate.providers:
            assert common(request.prompt_token_ids, lab.asked[provider].token_ids) >= size
        for index in range(lookup.found, (request.num_prompt_tokens - 1) // size):
            content = tuple(request.prompt_token_ids[: (index + 1) * size])
            computing = [lab.asked[other].prompt_token_ids for other, done in lookup.computing if done < len(content)]
            if content not in lookup.findable and not any(tuple(it[: len(content)]) == content for it in computing):
                drawn = next(it.fate for it in fate.stretches if it.start <= index * size < it.end)
                assert drawn == ("lost" if content in lookup.losses else "new")
        nearest = [
            (common(request.prompt_token_ids, lab.asked[other].token_ids), other)
            for other in list(lab.lookups)[: list(lab.lookups).index(key)]
            if other in lookup.ended and tuple(lab.asked[other].token_ids[:size]) in lookup.findable
        ]
        longest = max((num for num, _ in nearest), default=0)
        if fate.nearest is not None and fate.nearest.request_id in lookup.ended:
            assert fate.nearest.num_common >= longest
            assert fate.nearest.num_common == common(
                request.prompt_token_ids, lab.asked[fate.nearest.request_id].token_ids
            )
        else:
            assert longest == 0 or fate.nearest is not None


def small_runs(num_blocks: int = 40) -> Runs:
    return Runs(WatchedLab(block_size=4, num_blocks=num_blocks))


def add_run(runs: Runs, run: int, *prompts: list[int], max_tokens: int = 1) -> None:
    for index, prompt in enumerate(prompts):
        runs.lab.add(f"run{run}-{index}", prompt, max_tokens=max_tokens)
        runs.lab.run()
    runs.end_run()


def why(cache: PrefixCache, key: str) -> str:
    return " ".join(fate_sentences(cache.fate(key), 4))


def test_it_names_the_run_and_the_token() -> None:
    runs, first = small_runs(), list(range(100, 122))
    add_run(runs, 1, first)
    add_run(runs, 2, [9, 9, 9, 9, 9])
    add_run(runs, 3, [*first[:14], 1, 2, 3, 4, 5], [7] * 9)
    assert "12 of its 19 prompt tokens" in why(runs.cache(), "run3-0")
    assert "computed by request run1-0." in why(runs.cache(), "run3-0")
    assert "It differs at token 14 from the prompt of request run1-0, the nearest." in why(runs.cache(), "run3-0")
    assert "Nothing like it was cached" in why(runs.cache(), "run3-1")
    # Without the first run, whose blocks nobody has found since, its prompts are not known.
    assert "What it found was left by an earlier run" in why(runs.cache(first=1), "run3-0")
    assert "No prompt that is known here began with its first token" in why(runs.cache(first=1), "run3-1")


def test_blocks_of_an_unknown_run_are_known_once_they_have_been_found() -> None:
    runs, first = small_runs(), list(range(100, 122))
    add_run(runs, 1, first)
    add_run(runs, 2, first[:18])
    add_run(runs, 3, [*first[:14], 1, 2, 3, 4, 5])
    assert "computed by request run2-0." in why(runs.cache(first=1), "run3-0")
    assert "differs at token 14 from the prompt of request run2-0, the nearest that is known" in why(
        runs.cache(first=1), "run3-0"
    )


def test_what_was_evicted_before_the_run_and_in_it() -> None:
    runs, first, other = small_runs(num_blocks=10), list(range(100, 117)), list(range(200, 229))
    add_run(runs, 1, first)
    add_run(runs, 2, other)
    add_run(runs, 3, first, other)
    gone = why(runs.cache(), "run3-0")
    assert "had been in the cache, computed by request run1-0. It was evicted before this run began" in gone
    assert "to make room for request run2-0" in gone
    step = runs.lab.lookups["run3-0"].step
    assert f"computed by request run2-0. It was evicted in step {step} to make room for request run3-0" in why(
        runs.cache(), "run3-1"
    )


def test_a_later_turn_finds_the_answer_of_an_earlier_run() -> None:
    """The last block becomes findable behind the run's last step, which no event in its ledger tells."""
    runs, first = small_runs(), list(range(100, 112))
    add_run(runs, 1, first, max_tokens=9)
    answered = runs.lab.asked["run1-0"].token_ids
    assert len(answered) == 21
    add_run(runs, 2, [*answered, 1, 2, 3, 4])
    assert runs.lab.lookups["run2-0"].found == 5
    cache = runs.cache()
    assert cache.fate("run2-0").providers == ("run1-0",)
    assert "whose prompt and answer end with token 20" in why(cache, "run2-0")


def test_what_was_withdrawn_behind_a_runs_last_step_is_not_there_any_more() -> None:
    runs, first = Runs(WatchedLab(block_size=4, num_blocks=40, max_num_batched_tokens=8)), list(range(100, 122))
    runs.lab.fail_at["run1-0"] = 22
    add_run(runs, 1, first)
    add_run(runs, 2, [*first[:10], 1, 2, 3])
    assert runs.lab.lookups["run2-0"].found == 0
    assert runs.cache().fate("run2-0").nearest is None
    assert "It was withdrawn before this run began: that request's logits" in why(runs.cache(), "run2-0")


def test_a_ledger_without_events_is_refused() -> None:
    runs = small_runs()
    lab = runs.lab
    lab.manager.log_events(False)
    lab.ledger.append(0, ["a"], [1], ["prefill"])
    with pytest.raises(ValueError, match="no block events"):
        EarlierBlocks().take(lab.reader())
    assert EarlierBlocks().take(LedgerReader([])) == []


def test_requests_are_named_as_given() -> None:
    runs, first = small_runs(), list(range(100, 122))
    add_run(runs, 1, first)
    add_run(runs, 2, first)
    request: Request = runs.lab.asked["run2-0"]
    words = fate_sentences(runs.cache().fate("run2-0"), 4, lambda key: f"<{key}>")
    assert "computed by request <run1-0>." in words[0]
    assert request.num_cached_tokens == 20
