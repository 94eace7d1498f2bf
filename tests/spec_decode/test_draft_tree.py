from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import pytest

from backend.spec_decode.draft_tree import DEFAULT_TREES, EAGLE_RATES, MAX_NODES, DraftTree

# EAGLE's published static tree: 25 nodes beside the root.
EAGLE_PATHS = [
    *([rank] for rank in range(4)),
    *([0, rank] for rank in range(3)),
    *([1, 0], [1, 1], [2, 0], [2, 1], [3, 0]),
    *([0, 0, rank] for rank in range(3)),
    *([0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]),
    *([0, 0, 0, rank] for rank in range(3)),
    *([0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
]


def test_a_small_tree_by_hand() -> None:
    tree = DraftTree.from_paths([[0], [0, 0], [1], [1, 0], [0, 1], [1, 0, 0]])
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 5)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert (len(tree), tree.num_drafted, tree.depth) == (7, 6, 3)
    assert [list(level) for level in tree.levels] == [[0], [1, 2], [3, 4, 5], [6]]
    assert [list(children) for children in tree.children] == [[1, 2], [3, 4], [5], [], [], [6], []]
    assert tree.ranks == (0, 0, 1, 0, 1, 0, 0)
    assert tree.masks == (0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1100101)


@pytest.mark.parametrize(
    "paths", [EAGLE_PATHS, EAGLE_PATHS[::-1], [[0] * n for n in range(1, 64)], [[n] for n in range(63)]]
)
def test_bits_are_those_of_the_prefixes_of_a_path(paths: list[list[int]]) -> None:
    tree = DraftTree.from_paths(paths)
    assert sorted(tree.paths) == sorted(paths)
    nodes = [[], *tree.paths]
    for node, path in enumerate(nodes):
        ancestors = [path[:n] for n in range(len(path) + 1)]
        assert tree.masks[node] % 2**64 == sum(1 << nodes.index(ancestor) for ancestor in ancestors)
        assert -(2**63) <= tree.masks[node] < 2**63
        assert tree.depths[node] == len(path)
        assert [nodes[child] for child in tree.children[node]] == [
            other for other in nodes if other and other[:-1] == path
        ]


@pytest.mark.parametrize("tree", [DraftTree.from_paths(EAGLE_PATHS), *DEFAULT_TREES.values()])
def test_levels_cut_off_leave_the_others_their_numbers(tree: DraftTree) -> None:
    assert tree.cut(tree.depth) == tree.cut(99) == tree
    for depth in range(1, tree.depth):
        cut = tree.cut(depth)
        assert cut.depth == depth
        assert cut.paths == [path for path in tree.paths if len(path) <= depth]
        assert cut.masks == tree.masks[: len(cut)]
    with pytest.raises(ValueError, match="depth 0 would be its root alone; at least 1"):
        tree.cut(0)


def all_trees(num_nodes: int, depth: int, width: int) -> Iterator[set[tuple[int, ...]]]:
    """Every tree of that size in which no node stands without its parent and the sibling before it."""
    paths = [path for n in range(1, depth + 1) for path in itertools.product(range(width), repeat=n)]
    for chosen in itertools.combinations(paths, num_nodes):
        tree = set(chosen)
        if all(
            (len(path) == 1 or path[:-1] in tree) and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
            for path in tree
        ):
            yield tree


RATES = [(0.5, 0.3, 0.05), (0.6, 0.2, 0.1), (0.9, 0.08, 0.0)]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("rates", [RATES, RATES[::-1], [RATES[2]] * 3])
def test_no_tree_of_its_size_accepts_more(rates: list[tuple[float, ...]], num_nodes: int) -> None:
    def accepted(paths: set[tuple[int, ...]]) -> float:
        return sum(math.prod(by_rank[rank] for by_rank, rank in zip(rates, path, strict=False)) for path in paths)

    chosen = {tuple(path) for path in DraftTree.from_acceptance_rates(rates, num_nodes).paths}
    assert accepted(chosen) == pytest.approx(max(map(accepted, all_trees(num_nodes, 3, 3))), abs=1e-12)


def test_likelier_nodes_come_first() -> None:
    assert DraftTree.from_acceptance_rates([[0.9, 0.05], [0.9, 0.05]], 2).paths == [[0], [0, 0]]
    assert DraftTree.from_acceptance_rates([[0.5, 0.4], [0.5, 0.4]], 2).paths == [[0], [1]]
    assert DraftTree.from_acceptance_rates([[0.5, 0.5]], 2).paths == [[0], [1]]


def test_default_trees_fit_their_heads() -> None:
    eagle, medusa = DEFAULT_TREES["eagle"], DEFAULT_TREES["medusa"]
    assert (eagle.num_drafted, eagle.depth) == (25, len(EAGLE_RATES))
    assert medusa.num_drafted == 31
    assert medusa.depth <= 4  # heads


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        ([], "a draft tree has 1 to 63 nodes beside its root; this one 0"),
        ([[n] for n in range(64)], "a draft tree has 1 to 63 nodes beside its root; this one 64"),
        ([[]], "a path of a draft tree is empty"),
        ([[0], [0]], "path [0] is in the draft tree twice"),
        ([[-1]], "path [-1] ends with a rank below 0"),
        ([[0], [1, 0]], "path [1, 0] is in the draft tree, and [1] is not"),
        ([[0], [2]], "path [2] is in the draft tree, and [1] is not"),
        ([[0], [0, 1]], "path [0, 1] is in the draft tree, and [0, 0] is not"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths: list[list[int]], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        DraftTree.from_paths(paths)


@pytest.mark.parametrize("parents", [(-1,), (0, 0), (-1, -1), (-1, 1), (-1, 0, 2), (-1, 0, 1, 0)])
def test_parents_out_of_order_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"draft tree has|begin with"):
        DraftTree(parents)


@pytest.mark.parametrize(
    ("rates", "num_nodes", "problem"),
    [
        ([[0.5]], 0, "1 to 63 nodes beside its root; 0 were asked for"),
        ([[0.5]], MAX_NODES, "1 to 63 nodes beside its root; 64 were asked for"),
        ([[0.5], [0.5]], 3, "3 nodes were asked for, and acceptance rates of this size have 2 paths"),
        ([], 1, "at least one depth"),
        ([[0.5], []], 1, "at least one rank"),
        ([[0.5, 1.5]], 1, "rank 1 at depth 1 is 1.5; allowed are 0 to 1"),
        ([[0.5, math.nan]], 1, "rank 1 at depth 1 is nan; allowed are 0 to 1"),
    ],
)
def test_rates_that_give_no_tree_are_refused(rates: list[list[float]], num_nodes: int, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        DraftTree.from_acceptance_rates(rates, num_nodes)
