"""The prefix tree of a run: where its prompts part, and which of their common beginnings came from the prefix cache.

A radix tree over full blocks (as in SGLang's RadixAttention, Zheng et al. 2024), of what requests asked for rather than of
the pool at one moment: a node is a run of blocks that the same requests go through and the same of them found. All prompt
tokens are in it, each once, so its sums are the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from backend.analysis.prefix_cache import Fate, PrefixCache

# blocks: full ones; ends: behind the last full block of prompts; merged: what stands for several, `num_merged` of them
NodeKind = Literal["blocks", "ends", "merged"]


@dataclass(slots=True, eq=False)
class TreeNode:
    """Tokens `start` to `end` of some prompts; of unequal ends, `end` is their mean."""

    kind: NodeKind
    start: int
    end: float
    num_requests: int  # that go through it
    num_hits: int  # that found it in the cache; of a merged one, any of it
    tokens: dict[Fate, int]  # prompt tokens in it, of all its requests, by what became of them
    first: str  # request
    num_merged: int = 1
    children: list[TreeNode] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def num_saved(self) -> int:
        return self.tokens.get("cached", 0)


def prefix_tree(cache: PrefixCache, request_ids: Iterable[str]) -> list[TreeNode]:
    """The roots: beginnings that have no token in common block by block.

    Args:
        request_ids: of admitted requests whose tokens are known, in order of admission.
    """
    size = cache.block_size
    counts: dict[int, Counter[Fate]] = {}  # content -> requests through it, by what became of it
    firsts: dict[int, str] = {}
    below: dict[int, dict[int, None]] = {-1: {}}  # content -> those that follow it
    ends: dict[int, list[tuple[str, int]]] = {}  # content -> (request, tokens behind it)
    for request_id in request_ids:
        num_tokens, before = cache.tokens[request_id].num_prompt_tokens, -1
        fates: list[Fate] = [
            stretch.fate
            for stretch in cache.stretches(request_id)
            for _ in range(stretch.start // size, stretch.end // size)
        ]
        for content, fate in zip(cache.paths[request_id], fates, strict=False):
            below[before].setdefault(content)
            below.setdefault(content, {})
            firsts.setdefault(content, request_id)
            counts.setdefault(content, Counter())[fate] += 1
            before = content
        if num_tokens % size:
            ends.setdefault(before, []).append((request_id, num_tokens % size))
    roots: list[TreeNode] = []
    made: list[TreeNode] = []
    todo = [(-1, 0, roots)]
    while todo:
        before, start, siblings = todo.pop()
        for first in below[before]:
            content, end = first, start + size
            while (
                len(below[content]) == 1
                and content not in ends
                and counts[following := next(iter(below[content]))] == counts[first]
            ):
                content, end = following, end + size
            count = counts[first]
            tokens: dict[Fate, int] = {fate: number * (end - start) for fate, number in count.items()}
            node = TreeNode("blocks", start, end, count.total(), count["cached"], tokens, firsts[first])
            siblings.append(node)
            made.append(node)
            todo.append((content, end, node.children))
        if before in ends:
            siblings.append(_ends(start, ends[before]))
    for siblings in (roots, *(node.children for node in made)):
        siblings.sort(key=lambda node: (-node.num_saved, node.kind == "ends"))
    return roots


def walk(roots: Iterable[TreeNode]) -> Iterable[TreeNode]:
    """Every node, those above before those below."""
    todo = list(roots)[::-1]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(reversed(node.children))


def folded(roots: list[TreeNode], max_leaves: int, max_depth: int = 40) -> list[TreeNode]:
    """The tree with at most so many leaves: of each node's children those that saved most, the others as one.

    Sums of tokens stay as they are.
    """
    sums = _sums_below(roots)
    result: list[TreeNode] = []
    todo = [(roots, result, max_leaves, 1)]
    while todo:
        siblings, kept, budget, depth = todo.pop()
        siblings = sorted(siblings, key=lambda node: (-sums[id(node)].num_saved, -sums[id(node)].num_tokens))
        num_shown = len(siblings) if len(siblings) <= budget else budget - 1
        budgets = _shared_out(
            budget - num_shown - (num_shown < len(siblings)),
            [sums[id(node)].num_merged - 1 for node in siblings[:num_shown]],
        )
        for node, more in zip(siblings, budgets, strict=False):
            copy = replace(node, children=[])
            kept.append(copy)
            if not node.children:
                continue
            if depth == max_depth:
                copy.children.append(_merged(node.children, sums))
            else:
                todo.append((node.children, copy.children, 1 + more, depth + 1))
        if num_shown < len(siblings):
            kept.append(_merged(siblings[num_shown:], sums))
    return result


def _shared_out(spare: int, needs: list[int]) -> list[int]:
    """As even shares as the needs allow; nobody gets more than it needs."""
    shares = [0] * len(needs)
    for place, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[index] = min(needs[index], spare // (len(needs) - place))
        spare -= shares[index]
    return shares


def _ends(start: int, ends: list[tuple[str, int]]) -> TreeNode:
    num_tokens = sum(count for _, count in ends)
    return TreeNode("ends", start, start + num_tokens / len(ends), len(ends), 0, {"end": num_tokens}, ends[0][0])


def _sums_below(roots: list[TreeNode]) -> dict[int, TreeNode]:
    """By `id`: a node with all below it as one, `num_merged` its leaves."""
    sums: dict[int, TreeNode] = {}
    for node in reversed(list(walk(roots))):
        below = [sums[id(child)] for child in node.children]
        sums[id(node)] = replace(
            node,
            kind="merged",
            tokens=_sum([node, *below]),
            num_hits=max([node.num_hits, sum(child.num_hits for child in below)]),
            num_merged=sum(child.num_merged for child in below) or 1,
            children=[],
        )
    return sums


def _merged(nodes: list[TreeNode], sums: dict[int, TreeNode]) -> TreeNode:
    """Subtrees as one node."""
    if len(nodes) == 1 and not nodes[0].children:
        return replace(nodes[0])
    parts = [sums[id(node)] for node in nodes]
    num_requests, tokens, start = sum(part.num_requests for part in parts), _sum(parts), parts[0].start
    return TreeNode(
        "merged",
        start,
        start + sum(tokens.values()) / num_requests,
        num_requests,
        sum(part.num_hits for part in parts),
        tokens,
        parts[0].first,
        sum(part.num_merged for part in parts),
    )


def _sum(nodes: Iterable[TreeNode]) -> dict[Fate, int]:
    sums: Counter[Fate] = Counter()
    for node in nodes:
        sums.update(node.tokens)
    return dict(sums)
