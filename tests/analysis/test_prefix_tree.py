"""The prefix tree: its sums are what the scheduler has counted, its branches those of a naive comparison of prompts."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from backend.analysis.prefix_cache import FATES, Stretch
from backend.analysis.prefix_tree import TreeNode, folded, prefix_tree, walk
from backend.analysis.run_prompts import RequestTokens
from tests.metrics.prefix_traffic import WatchedLab, random_lab


def tree_of(lab: WatchedLab) -> list[TreeNode]:
    cache = lab.cache()
    return prefix_tree(cache, cache.history.admissions)


def sums(roots: list[TreeNode]) -> tuple[int, int]:
    return sum(node.num_tokens for node in walk(roots)), sum(node.num_saved for node in walk(roots))


def num_leaves(roots: list[TreeNode]) -> int:
    return sum(not node.children for node in walk(roots))


class Drawn:
    """A `PrefixCache` by hand: prompts whose tokens are characters, in blocks of 2, with so many blocks found."""

    block_size = 2

    def __init__(self, prompts: dict[str, str], found: dict[str, int]) -> None:
        self.found, self.paths = found, {}
        contents: dict[str, int] = {}
        for key, text in prompts.items():
            self.paths[key] = [contents.setdefault(text[:end], len(contents)) for end in range(2, len(text) + 1, 2)]
        self.tokens = {key: RequestTokens(np.zeros(len(text), np.uint32), len(text)) for key, text in prompts.items()}

    def stretches(self, key: str) -> list[Stretch]:
        num, cached = self.tokens[key].num_prompt_tokens, 2 * self.found.get(key, 0)
        last = (num - 1) // 2 * 2
        return [Stretch("cached", 0, cached), Stretch("new", cached, last), Stretch("end", last, num)]


def made(prompts: dict[str, str], found: dict[str, int]) -> list[TreeNode]:
    return prefix_tree(Drawn(prompts, found), prompts)  # type: ignore[arg-type]


def drawn(roots: list[TreeNode], depth: int = 0) -> list[tuple[int, str, int, float, int, int, int]]:
    lines = []
    for node in roots:
        lines.append((depth, node.kind, node.start, node.end, node.num_requests, node.num_hits, node.num_saved))
        lines += drawn(node.children, depth + 1)
    return lines


def test_a_tree_drawn_by_hand() -> None:
    """`aabbcc` is computed by a; b finds it whole, c its first two blocks, d is a beginning of it, e like nothing."""
    prompts = {"a": "aabbccx", "b": "aabbccyy", "c": "aabbddz", "d": "aab", "e": "zzzz"}
    assert drawn(made(prompts, {"b": 3, "c": 2, "d": 1})) == [
        (0, "blocks", 0, 2, 4, 3, 6),
        (1, "blocks", 2, 4, 3, 2, 4),
        (2, "blocks", 4, 6, 2, 1, 2),
        (3, "blocks", 6, 8, 1, 0, 0),
        (3, "ends", 6, 7, 1, 0, 0),
        (2, "blocks", 4, 6, 1, 0, 0),
        (3, "ends", 6, 7, 1, 0, 0),
        (1, "ends", 2, 3, 1, 0, 0),
        (0, "blocks", 0, 2, 1, 0, 0),
        (1, "blocks", 2, 4, 1, 0, 0),
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_sums_are_what_the_scheduler_has_counted(ahead: int) -> None:
    for seed in range(6):
        lab = random_lab(seed, ahead)
        roots = tree_of(lab)
        admitted = [lab.asked[key] for key in lab.lookups]
        counted = sum(request.num_cached_tokens or 0 for request in admitted)
        assert counted > 0
        assert sums(roots) == (sum(request.num_prompt_tokens for request in admitted), counted)
        cache = lab.cache()
        for fate in FATES:
            expected = sum(cache.fate(request.request_id).num_tokens(fate) for request in admitted)
            assert sum(node.tokens.get(fate, 0) for node in walk(roots)) == expected
        # Block by block: how many prompts begin so, and how many of them were found so far.
        size = lab.block_size
        prompts, hits = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        for request in admitted:
            for end in range(size, request.num_prompt_tokens + 1, size):
                prompts[tuple(request.prompt_token_ids[:end])] += 1
                hits[tuple(request.prompt_token_ids[:end])] += end <= (request.num_cached_tokens or 0)
        for node in walk(roots):
            if node.kind == "ends":
                continue
            ids = lab.asked[node.first].prompt_token_ids
            for end in range(node.start + size, int(node.end) // size * size + 1, size):
                content = tuple(ids[:end])
                assert (prompts.pop(content), hits[content]) == (node.num_requests, node.num_hits)
        assert not prompts, "every beginning stands in one node"


@pytest.mark.parametrize("max_leaves", [1, 2, 5, 17, 50])
def test_folding_keeps_the_sums_and_the_largest(max_leaves: int) -> None:
    for seed in range(4):
        roots = tree_of(random_lab(seed))
        small = folded(roots, max_leaves)
        assert sums(small) == sums(roots)
        assert num_leaves(small) <= max_leaves
        for node in walk(small):
            assert sum(child.num_requests for child in node.children) <= node.num_requests
            assert node.num_tokens == pytest.approx((node.end - node.start) * node.num_requests)
        if max_leaves > 1:
            most = max(roots, key=lambda root: sum(node.num_saved for node in walk([root])))
            assert (small[0].start, small[0].end, small[0].num_saved) == (0, most.end, most.num_saved)
    assert num_leaves(roots) > 17


def test_nothing_is_folded_that_fits() -> None:
    for seed in range(4):
        roots = tree_of(random_lab(seed))
        whole = folded(roots, num_leaves(roots))
        assert num_leaves(whole) == num_leaves(roots)
        assert not [node for node in walk(whole) if node.kind == "merged"]
        assert [node for node in walk(folded(roots, num_leaves(roots) - 1)) if node.kind == "merged"]


def test_what_need_not_be_folded_stays_as_it_is_and_depth_is_bounded() -> None:
    roots = made({"a": "aabbccx", "b": "aabbccyy", "c": "aabbddz", "e": "zzzz"}, {"b": 3, "c": 2})
    assert drawn(folded(roots, 50)) == drawn(roots)
    rng = random.Random(1)
    text = "".join(rng.choices("abcdefgh", k=400))
    chain = made({str(end): text[:end] for end in range(2, 401, 2)}, {})
    small = folded(chain, 50, max_depth=10)
    depth = max(line[0] for line in drawn(small)) + 1
    assert depth == 11
    assert sums(small) == sums(chain)


def test_a_long_chain_is_walked_without_recursion() -> None:
    text = "".join(random.Random(2).choices("abcdefgh", k=2400))
    chain = made({str(end): text[:end] for end in range(2, 2401, 2)}, {})
    assert num_leaves(folded(chain, 50, max_depth=3000)) <= 50


def test_no_request_no_tree() -> None:
    assert made({}, {}) == []
    assert folded([], 50) == []
