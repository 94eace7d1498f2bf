"""Trees over the tables of `Chain`, and the law of what the sampler makes of a tree, measured from its outputs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.sample.filtering import draw_tokens, probabilities
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sample.tree_rejection import TreeRejectionSampler, VerifiedTree
from backend.spec_decode.draft_tree import DraftTree
from tests.sample.rounds import CPU
from tests.sample.speculative_chain import NUM_TOKENS, Chain, same_for_all

STEPS = 25  # of a bisection


def thresholds(is_below: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """float64 [count]: up to which draw a monotone property holds."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(STEPS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


@dataclass(frozen=True)
class TreeLaw:
    """Of several drafts at once. The later a child, the larger the draws that take it; so do tokens rise with their draw.

    Attributes:
        logits: [num_drafts, num_nodes, vocab_size].
        tokens: [num_drafts, num_nodes - 1].
    """

    tree: DraftTree
    logits: Tensor
    tokens: Tensor
    draft_probs: Tensor | None
    sampling: SpeculativeSampling  # of one row

    def outcomes(self) -> list[tuple[int, Tensor]]:
        """Of each node, how probable it is that a round ends there with each token: float64 [num_drafts, vocab_size]."""
        num_drafts = len(self.tokens)
        found: list[tuple[int, Tensor]] = []
        ones = torch.ones(num_drafts, dtype=torch.float64)
        self._follow(0, ones, torch.zeros(num_drafts, self.tree.depth, dtype=torch.float64), found)
        return found

    def _follow(self, node: int, reached: Tensor, accept: Tensor, found: list[tuple[int, Tensor]]) -> None:
        """accept: draws that lead to the node, where it can be reached."""
        depth, edges = self.tree.depths[node], [torch.zeros_like(reached)]
        for child in self.tree.children[node]:

            def takes(draws: Tensor, child: int = child) -> Tensor:
                taken = self._run(1, _with(accept, depth, draws), draws).accepted_nodes[:, depth]
                return (taken >= 0) & (taken <= child)

            edges.append(thresholds(takes, len(reached)))
            begin, end = edges[-2:]
            share = (end - begin).where(end - begin > 2.0 ** (2 - STEPS), 0)
            self._follow(child, reached * share, _with(accept, depth, (begin + end) / 2), found)
        refusing = _with(accept, depth, (edges[-1] + 1) / 2) if self.tree.children[node] else accept
        found.append((node, reached[:, None] * (1 - edges[-1][:, None]) * self._last(refusing, depth)))

    def _last(self, accept: Tensor, depth: int) -> Tensor:
        """[num_drafts, vocab_size]: of the token that ends a round of these draws."""
        num_below = self.logits.shape[-1] - 1
        ids = torch.arange(num_below).repeat(len(accept))
        accept = accept.repeat_interleave(num_below, 0)

        def is_below(draws: Tensor) -> Tensor:
            return self._run(num_below, accept, draws).token_ids[:, depth] <= ids

        cumulative = thresholds(is_below, len(ids)).view(-1, num_below)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(cumulative, (1, 0)), (0, 1), value=1.0)
        return edges.diff(dim=-1)

    def _run(self, repeats: int, accept: Tensor, last: Tensor) -> VerifiedTree:
        """Every draft `repeats` times. accept, last: draws [rows, depth] and [rows]."""
        inputs = (self.logits, self.tokens, self.draft_probs)
        logits, tokens, probs = (None if x is None else x.repeat_interleave(repeats, 0) for x in inputs)
        assert logits is not None
        assert tokens is not None
        rows, one = len(tokens), self.sampling
        many = replace(
            one,
            **{name: getattr(one, name).expand(rows) for name in ("temperature", "top_k", "top_p")},
            banned_token_ids=None if one.banned_token_ids is None else one.banned_token_ids.expand(rows, -1),
            num_banned_positions=None if one.num_banned_positions is None else one.num_banned_positions.expand(rows),
            accept_draws=accept,
            recovered_draws=last[:, None].expand(-1, self.tree.depth),
            token_draws=last[:, None].expand(-1, self.tree.depth + 1),
        )
        counts = torch.full((rows,), self.tree.num_drafted)
        return TreeRejectionSampler(self.tree, CPU)(logits, tokens, counts, probs, many)


def _with(accept: Tensor, column: int, draws: Tensor) -> Tensor:
    accept = accept.clone()
    accept[:, column] = draws
    return accept


def decode_by_trees(chain: Chain, tree: DraftTree, num_rows: int, seed: int, *, drawn: bool) -> Tensor:
    """int64 [num_rows, 3], by rounds.

    Args:
        drawn: siblings are draws; else the draft's likeliest tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = chain._draft_weights(chain.row)
    tokens = torch.zeros(num_rows, NUM_TOKENS + tree.depth + 1, dtype=torch.int64)
    count = torch.zeros(num_rows, dtype=torch.int64)
    inner = [node for node in range(len(tree)) if tree.children[node]]
    while len(open_rows := (count < NUM_TOKENS).nonzero()[:, 0]):
        place = count[open_rows, None]
        nodes = torch.zeros(len(open_rows), len(tree), dtype=torch.int64)
        nodes[:, 0] = tokens[open_rows].gather(1, place)[:, 0]
        for node in inner:
            left, children = weights[nodes[:, node]], tree.children[node]
            if not drawn:
                nodes[:, children.start : children.stop] = left.topk(len(children)).indices
                continue
            for child in children:
                nodes[:, child] = draw_tokens(left, torch.rand(len(left), generator=generator, dtype=torch.float64))
                left = left.scatter(1, nodes[:, child, None], 0)
        output = TreeRejectionSampler(tree, CPU)(
            chain.target[nodes],
            nodes[:, 1:],
            torch.full((len(open_rows),), tree.num_drafted),
            probabilities(weights)[nodes[:, inner]] if drawn else None,
            same_for_all(len(open_rows), tree.depth, generator, chain.row),
        )
        tokens[open_rows[:, None], place + 1 + torch.arange(tree.depth + 1)] = output.token_ids
        count[open_rows] += output.num_accepted + 1
    return tokens[:, 1 : NUM_TOKENS + 1]
