"""`DraftTree`: which continuations of a text are drafted together, fixed before anything is drafted.

Static trees are those of Medusa (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
2024), which also chooses their nodes by measured acceptance; EAGLE (Li et al., 2024) drafts along such a tree level by level.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_NODES = 64  # a node's ancestors are bits of one int64


@dataclass(frozen=True)
class DraftTree:
    """A node holds a token; the root, node 0, the text's last one, which is no draft.

    Nodes are in order of depth and beside their siblings, those in order of rank: child j of a node, from 0, is the proposer's
    choice number j + 1 there. So the first nodes, up to any number, are a tree as well.

    Attributes:
        parents: of each node, an earlier one and none before its predecessor's; -1 of the root.

    Raises:
        ValueError: there is no node but the root, there are more than 64, or the parents are not in that order.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        parents = self.parents
        if not 2 <= len(parents) <= MAX_NODES:
            raise ValueError(
                f"a draft tree has 1 to {MAX_NODES - 1} nodes beside its root; this one {len(parents) - 1}"
            )
        if parents[0] != -1 or parents[1] != 0:
            raise ValueError(
                f"parents {parents} begin with {parents[:2]}; node 0 is the root, and node 1 its child: (-1, 0)"
            )
        for node in range(2, len(parents)):
            if not parents[node - 1] <= parents[node] < node:
                raise ValueError(
                    f"node {node} of a draft tree has parent {parents[node]}; in order of depth, with siblings side by side, it "
                    f"may be {parents[node - 1]} to {node - 1}"
                )

    @staticmethod
    def chain(num_tokens: int) -> DraftTree:
        """The tree of one path. Raises as the constructor."""
        return DraftTree(tuple(range(-1, num_tokens)))

    @staticmethod
    def from_paths(paths: Iterable[Sequence[int]]) -> DraftTree:
        """The tree whose nodes are at the ends of these paths, in any order: ranks from the root on, as in Medusa's lists.

        Raises:
            ValueError: as the constructor; a path is empty, there twice or below 0, or is there without its parent's, or
                without the one whose last rank is less by one.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in ordered:
            if path in nodes:
                raise ValueError(
                    f"path {list(path)} is in the draft tree twice" if path else "a path of a draft tree is empty"
                )
            if path[-1] < 0:
                raise ValueError(f"path {list(path)} ends with a rank below 0")
            needed = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
            for missing in (path[:-1], needed):
                if missing not in nodes:
                    raise ValueError(f"path {list(path)} is in the draft tree, and {list(missing)} is not")
            parents.append(nodes[path[:-1]])
            nodes[path] = len(nodes)
        return DraftTree(tuple(parents))

    @staticmethod
    def from_acceptance_rates(rates: Sequence[Sequence[float]], num_nodes: int) -> DraftTree:
        """The tree of so many nodes beside the root that accepts most, by the greedy choice of Medusa (2024, section 2.3.3).

        A node is reached and accepted with the product of the rates along its path, and adds that much to the mean acceptance
        length: the likeliest nodes are taken, a node after its parent and after the sibling before it. Where rates fall with
        rank, as they do but for noise, no tree of that size accepts more.

        Args:
            rates: at each depth below the root, of each rank, how often that choice of the proposer's is the target's, where
                all before it are.
        Raises:
            ValueError: as the constructor; a rate is not within 0 to 1, a depth has none, or there are fewer paths than nodes.
        """
        if not 1 <= num_nodes < MAX_NODES:
            raise ValueError(f"a draft tree has 1 to {MAX_NODES - 1} nodes beside its root; {num_nodes} were asked for")
        if not rates or not all(rates):
            raise ValueError("acceptance rates need at least one depth, and at least one rank at each")
        for depth, by_rank in enumerate(rates, start=1):
            for rank, rate in enumerate(by_rank):
                if not 0 <= rate <= 1:
                    raise ValueError(
                        f"the acceptance rate of rank {rank} at depth {depth} is {rate}; allowed are 0 to 1"
                    )
        # Less deep ones first among equals, then by path, so that the choice is the same everywhere.
        open_nodes: list[tuple[float, int, tuple[int, ...]]] = [(-rates[0][0], 1, (0,))]
        paths: list[tuple[int, ...]] = []
        while open_nodes and len(paths) < num_nodes:
            share, depth, path = heapq.heappop(open_nodes)
            paths.append(path)
            if depth < len(rates):
                heapq.heappush(open_nodes, (share * rates[depth][0], depth + 1, (*path, 0)))
            by_rank, rank = rates[depth - 1], path[-1]
            if rank + 1 < len(by_rank):
                before = _share(rates, path[:-1])
                heapq.heappush(open_nodes, (-before * by_rank[rank + 1], depth, (*path[:-1], rank + 1)))
        if len(paths) < num_nodes:
            raise ValueError(
                f"{num_nodes} nodes were asked for, and acceptance rates of this size have {len(paths)} paths"
            )
        return DraftTree.from_paths(paths)

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @property
    def num_drafted(self) -> int:
        """Nodes without the root: slots that a round needs behind the text's last token."""
        return len(self.parents) - 1

    @property
    def depth(self) -> int:
        """Of the deepest node, the root's being 0: the most tokens that a round accepts."""
        return self.depths[-1]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each depth, the root's first."""
        depths = self.depths
        return tuple(range(depths.index(d), len(depths) - depths[::-1].index(d)) for d in range(self.depth + 1))

    @property
    def num_drafted_to(self) -> tuple[int, ...]:
        """Nodes without the root down to each depth, the root's own, 0, first."""
        return tuple(level.stop - 1 for level in self.levels)

    @cached_property
    def children(self) -> tuple[range, ...]:
        """Of each node, by rank; empty for a leaf."""
        children = [range(0)] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent] = range(children[parent].start or node, node + 1)
        return tuple(children)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each node among its siblings; 0 of the root."""
        return tuple(
            0 if parent < 0 else node - self.children[parent].start for node, parent in enumerate(self.parents)
        )

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Of each node its own bit and those of its ancestors, bit i being node i's, as signed 64-bit numbers."""
        bits = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            bits.append(bits[parent] | 1 << node)
        return tuple(mask - (1 << 64) if mask >> 63 else mask for mask in bits)

    @property
    def paths(self) -> list[list[int]]:
        """As `from_paths` takes them."""
        paths: list[list[int]] = [[]]
        for node in range(1, len(self)):
            paths.append([*paths[self.parents[node]], self.ranks[node]])
        return paths[1:]

    def cut(self, depth: int) -> DraftTree:
        """Its first levels, up to that depth; the nodes keep their numbers. Raises `ValueError` for a depth below 1."""
        if depth < 1:
            raise ValueError(f"a draft tree of depth {depth} would be its root alone; at least 1 is needed")
        return self if depth >= self.depth else DraftTree(self.parents[: self.levels[depth].stop])


def _share(rates: Sequence[Sequence[float]], path: Sequence[int]) -> float:
    share = 1.0
    for by_rank, rank in zip(rates, path, strict=False):
        share *= by_rank[rank]
    return share


# By depth and rank, where a head's own rates are not known: round numbers of the size that such heads reach. An EAGLE head's
# stay, since each draft reads the one before it; Medusa heads guess the further the worse. What was measured of the EAGLE head
# that comes for SmolLM2 (0.65 to 0.7, 0.09, 0.045, 0.022, 0.016, 0.011) makes no better tree of this size.
EAGLE_RATES = ((0.6, 0.15, 0.07, 0.04, 0.03, 0.02),) * 5
MEDUSA_RATES = (
    (0.5, 0.14, 0.07, 0.05, 0.035, 0.025, 0.02, 0.016),
    (0.3, 0.12, 0.07, 0.05, 0.035, 0.025, 0.02, 0.016),
    (0.2, 0.09, 0.06, 0.045, 0.035, 0.025, 0.02, 0.016),
    (0.15, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02, 0.016),
)
DEFAULT_TREES = {
    "eagle": DraftTree.from_acceptance_rates(EAGLE_RATES, 25),
    "medusa": DraftTree.from_acceptance_rates(MEDUSA_RATES, 31),
}
