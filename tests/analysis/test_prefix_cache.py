"""Why a prompt was found or not: against a naive pool of tokens, and case by case."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest

from backend.analysis.prefix_cache import FATES, PrefixCache, PromptFate
from backend.analysis.prefix_words import fate_sentences
from backend.metrics.prefix_history import Admission, BlockLife
from backend.request import Request
from tests.core.paged_machine import generate
from tests.metrics.prefix_traffic import Lookup, WatchedLab, random_lab, tokens_of


def common(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def naive_nearest(lab: WatchedLab, request: Request, lookup: Lookup, before: list[str]) -> tuple[str, int] | None:
    """Over all prompts before, token by token."""
    size, best = lab.block_size, None
    for key in before:
        token_ids = lab.asked[key].token_ids
        extent = 0
        while (extent + 1) * size <= len(token_ids) and tuple(token_ids[: (extent + 1) * size]) in lookup.findable:
            extent += 1
        if not extent:
            continue
        if key not in lookup.ended:
            token_ids = token_ids[: max(lab.asked[key].num_prompt_tokens, extent * size)]
        num = common(request.prompt_token_ids, token_ids)
        if best is None or num > best[1]:
            best = key, num
    return best


def naive_fate(lab: WatchedLab, request: Request, lookup: Lookup, index: int) -> str:
    content = tuple(request.prompt_token_ids[: (index + 1) * lab.block_size])
    if content in lookup.findable:
        return "cached"
    for key, computed in lookup.computing:
        prompt = lab.asked[key].prompt_token_ids
        if computed < len(content) and tuple(prompt[: len(content)]) == content:
            return "pending"
    return "lost" if content in lookup.losses else "new"


def check_cause(lab: WatchedLab, fate: PromptFate, request: Request, lookup: Lookup) -> str:
    """That the cause is the naive one; what it is called."""
    size, prompt, cause = lab.block_size, request.prompt_token_ids, fate.cause
    if lookup.found == (len(prompt) - 1) // size:
        assert cause == ("partial_block" if len(prompt) % size else "last_token")
        return str(cause)
    content = tuple(prompt[: (lookup.found + 1) * size])
    match naive_fate(lab, request, lookup, lookup.found):
        case "pending":
            assert isinstance(cause, Admission)
            computed = dict(lookup.computing)[cause.request_id]
            assert computed < len(content)
            assert tuple(lab.asked[cause.request_id].prompt_token_ids[: len(content)]) == content
            return "pending"
        case "lost":
            loss = lookup.losses[content]
            assert isinstance(cause, BlockLife)
            assert (cause.how, cause.end_step, cause.taken_by) == (loss.how, loss.step, loss.by)
            assert cause.owner is not None
            assert tuple(lab.asked[cause.owner].token_ids[: len(content)]) == content
            return loss.how
    nearest = fate.nearest
    if not lookup.findable:
        assert cause == "empty"
    elif nearest is None or not nearest.num_common:
        assert cause == "nothing"
    elif nearest.num_common >= len(content):
        assert cause == "unfinished"
    else:
        assert cause == ("ends" if nearest.num_common == len(nearest.token_ids) else "differs")
    return str(cause)


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_prompt_of_random_traffic_has_the_fate_that_a_naive_pool_tells(ahead: int) -> None:
    """Six pools; block sizes, budgets, evictions, preemptions, damaged logits and resets as they come."""
    seen: set[str] = set()
    fates: set[str] = set()
    for seed in range(6):
        lab = random_lab(seed, ahead)
        cache, keys = lab.cache(), list(lab.lookups)
        assert list(cache.history.admissions) == keys
        for place, key in enumerate(keys):
            request, lookup, fate = lab.asked[key], lab.lookups[key], cache.fate(key)
            size, prompt = lab.block_size, request.prompt_token_ids
            assert fate.admission.step == lookup.step
            assert fate.num_cached_tokens == lookup.found * size == request.num_cached_tokens
            nearest = fate.nearest and (fate.nearest.request_id, fate.nearest.num_common)
            assert nearest == naive_nearest(lab, request, lookup, keys[:place])
            seen.add(check_cause(lab, fate, request, lookup))
            # Stretches are the fates of all blocks, in order; what stands behind a gap counts with the gap.
            expected = ["cached"] * lookup.found
            for index in range(lookup.found, (len(prompt) - 1) // size):
                found = naive_fate(lab, request, lookup, index)
                last = expected[-1] if index > lookup.found else "lost"
                expected.append(last if found == "cached" else found)
            drawn = [part.fate for part in fate.stretches for _ in range(part.start, part.end)]
            assert drawn[: len(expected) * size] == [name for name in expected for _ in range(size)]
            assert set(drawn[len(expected) * size :]) == {"end"}
            assert len(drawn) == len(prompt)
            fates |= set(drawn)
            for provider in fate.providers:
                assert common(prompt, lab.asked[provider].token_ids) >= size
            assert len(fate_sentences(fate, size)) >= 2
    assert fates == set(FATES)
    expected = {"last_token", "partial_block", "empty", "nothing", "differs", "evicted", "reset", "pending"}
    assert expected <= seen


def prompts_lab(**settings: int) -> WatchedLab:
    return WatchedLab(block_size=4, **({"num_blocks": 40} | settings))  # type: ignore[arg-type]


def after(lab: WatchedLab, key: str, prompt: list[int], max_tokens: int = 1) -> str:
    """Ask, let it end, and say why it was not found, without the first sentence."""
    lab.add(key, prompt, max_tokens=max_tokens)
    lab.run()
    return why(lab, key)


def why(lab: WatchedLab, key: str) -> str:
    return " ".join(fate_sentences(lab.cache().fate(key), lab.block_size)[1:])


def test_each_reason_in_words() -> None:
    lab = prompts_lab()
    first = list(range(100, 122))
    assert after(lab, "a", first) == "The cache was empty: no block could be found by anybody."
    assert after(lab, "b", [7, *first]).startswith("Nothing like it was cached")
    assert "differs at token 11 from the prompt of request a, the nearest." in after(
        lab, "c", [*first[:11], 5, *range(9)]
    )
    assert "The 3 tokens before that are the same in both, but do not fill a block" in why(lab, "c")
    assert "The other 2 tokens could not" in after(lab, "d", first)
    assert "Nobody could have found more: the last token always runs again" in after(lab, "e", first[:20])
    turn = [*first, *generate(first, 6), 1, 2, 3, 4, 5]
    assert "differs at token 23 from the prompt of request a" not in after(lab, "f", turn)
    assert "whose prompt and answer end with token 22" in why(lab, "f"), "an answer of one token"
    assert "20 of its 33 prompt tokens (60.6 %)" in fate_sentences(lab.cache().fate("f"), 4)[0]
    assert fate_sentences(lab.cache().fate("f"), 4)[0].endswith("computed by request a.")
    lab.manager.reset_prefix_cache()
    assert "The cache was reset before step" in after(lab, "g", first)


def test_an_evicted_block_names_who_took_it() -> None:
    lab = prompts_lab(num_blocks=10)
    first, other = list(range(100, 117)), list(range(200, 229))
    after(lab, "a", first)
    after(lab, "large", other)
    step = lab.lookups["large"].step
    words = after(lab, "again", first)
    assert f"evicted in step {step} to make room for request large" in words
    assert "had been in the cache from step 0 on, computed by request a" in words


def test_two_at_once_and_damaged_logits() -> None:
    lab = prompts_lab()
    prompt = list(range(100, 122))
    for key in "ab":
        lab.add(key, prompt)
    lab.run()
    assert "was not computed yet: request a has the same tokens, was admitted for step 0" in why(lab, "b")
    lab = prompts_lab()
    lab.fail_at["a"] = 22
    lab.add("a", prompt)
    lab.add("b", prompt[:3])
    lab.run()
    assert "logits turned out to be damaged" in after(lab, "c", prompt)


def test_blocks_from_before_the_run_are_found_but_nobodys() -> None:
    lab = prompts_lab()
    prompt = list(range(100, 122))
    lab.add("before", prompt, max_tokens=1)
    lab.run()
    lab.chunks, lab.num_steps = [], 0
    lab.ledger.flush()
    lab.manager.take_events()
    words = after(lab, "a", [*prompt[:14], 1, 2, 3, 4, 5])
    fate = lab.cache().fate("a")
    assert (fate.num_cached_tokens, fate.providers, fate.nearest) == (12, (), None)
    assert "left by an earlier run" in fate_sentences(fate, 4)[0]
    assert words == "What it found was left by an earlier run, whose prompts are not known here."


def test_tokens_of_some_requests_only() -> None:
    """What is not known is not looked through, and nothing else changes."""
    lab = prompts_lab()
    prompt = list(range(100, 122))
    for key, change in (("a", 30), ("b", 10), ("c", 12)):
        asked = list(prompt)
        if change < len(asked):
            asked[change] = 1
        after(lab, key, asked)
    whole = lab.cache()
    part = PrefixCache(whole.history, {key: tokens_of(lab.asked[key]) for key in "bc"})
    nearest = part.fate("c").nearest
    assert nearest is not None
    assert (nearest.request_id, nearest.num_common) == ("b", 10)
    assert part.fate("c").num_cached_tokens == whole.fate("c").num_cached_tokens == 12
    assert part.fate("c").providers == ("a",)
    with pytest.raises(KeyError):
        part.fate("a")
    assert np.array_equal(part.fate("c").token_ids, np.array(lab.asked["c"].prompt_token_ids))
