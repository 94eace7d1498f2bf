"""The tokens of a tree have the target's distribution; three mutants of its verification do not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from backend.sample import node_law, tree_rejection
from backend.sample.node_law import NodeLaw, Tried
from backend.sampling_params import SamplingParams
from backend.spec_decode.draft_tree import DraftTree
from tests.sample.rounds import build
from tests.sample.speculative_chain import Chain
from tests.sample.speculative_tree import TreeLaw, decode_by_trees
from tests.sample.test_sampler import filtered

VOCAB_SIZE = 4
TREE = DraftTree.from_paths([[0], [1], [0, 0], [0, 1]])
SPARSE = DraftTree.from_paths([[0], [1], [2], [1, 0]])
WIDE = DraftTree.from_paths([[0], [1], [2], [0, 0], [1, 0], [1, 1]])
PLAIN = {"temperature": 1.0}
Path = tuple[int, ...]


def target_of(logits: Tensor, depth: int, params: SamplingParams, banned: int) -> Tensor:
    known = logits.clone()
    if depth < params.min_tokens:
        known[banned] = -torch.inf
    if params.temperature == 0:
        return torch.nn.functional.one_hot(known.argmax(), len(known)).double()
    return filtered(known, params.temperature, params.top_k, params.top_p)


def ordered_draws(probs: list[float], count: int) -> list[tuple[Path, float]]:
    """All that may be drawn without replacement, in order, and how probable it is."""
    draws: list[tuple[Path, float]] = [((), 1.0)]
    for _ in range(count):
        draws = [
            ((*drawn, token), share * probs[token] / (1 - sum(probs[x] for x in drawn)))
            for drawn, share in draws
            for token in range(len(probs))
            if token not in drawn
        ]
    return draws


def largest_error(tree: DraftTree, row: dict[str, Any], drawn: bool) -> float:
    """Between the law of depth + 1 tokens and the target's, with distributions of their own at every prefix.

    What a round leaves open of the tokens is filled up by the target, as further rounds would.
    """
    generator, params, banned, k = torch.Generator().manual_seed(7), SamplingParams(**row), 2, tree.depth
    prefixes = [prefix for n in range(k + 1) for prefix in itertools.product(range(VOCAB_SIZE), repeat=n)]
    logits, drafts = (
        {prefix: 1.5 * torch.randn(VOCAB_SIZE, generator=generator) for prefix in prefixes} for _ in range(2)
    )
    target = {prefix: target_of(logits[prefix], len(prefix), params, banned) for prefix in prefixes}
    q = {prefix: drafts[prefix].softmax(-1) for prefix in prefixes}

    texts: list[tuple[dict[int, Path], float]] = [({0: ()}, 1.0)]  # what each node's path holds
    for node in range(len(tree)):
        children = tree.children[node]
        texts = [
            (
                text | {child: (*text[node], token) for child, token in zip(children, tokens, strict=True)},
                share * probability,
            )
            for text, share in texts
            for tokens, probability in (
                ordered_draws(q[text[node]].double().tolist(), len(children))
                if drawn
                else [(tuple(q[text[node]].topk(len(children)).indices.tolist()), 1.0)]
            )
        ]
    inner = [node for node in range(len(tree)) if tree.children[node]]
    sampling = build([row], k, banned=[(banned,) if params.min_tokens else ()]) if params.temperature else None
    law = TreeLaw(
        tree,
        torch.stack([torch.stack([logits[text[node]] for node in range(len(tree))]) for text, _ in texts]),
        torch.tensor([[text[node][-1] for node in range(1, len(tree))] for text, _ in texts]),
        torch.stack([torch.stack([q[text[node]] for node in inner]) for text, _ in texts]) if drawn else None,
        sampling or replace(build([PLAIN], k), temperature=torch.zeros(1)),  # greedy, as in a batch with others
    )
    found = torch.zeros([VOCAB_SIZE] * (k + 1), dtype=torch.float64)

    def after(text: Path) -> Tensor:
        """Of the tokens up to k + 1 behind a text."""
        if len(text) == k + 1:
            return torch.ones((), dtype=torch.float64)
        return torch.stack([target[text][token] * after((*text, token)) for token in range(VOCAB_SIZE)])

    follows = {text: after(text) for n in range(k + 2) for text in itertools.product(range(VOCAB_SIZE), repeat=n)}
    for node, probs in law.outcomes():
        for (text, share), by_token in zip(texts, probs.tolist(), strict=True):
            for token in range(VOCAB_SIZE):
                tokens = (*text[node], token)
                found[tokens] += share * by_token[token] * follows[tokens]
    return float((found - follows[()]).abs().max())


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(
    ("tree", "row"),
    [
        (TREE, PLAIN),
        (TREE, {"temperature": 0.6, "top_k": 3}),
        (TREE, {"temperature": 0.9, "top_p": 0.9, "min_tokens": 1}),
        (TREE, {"temperature": 0.0}),
        (SPARSE, {"temperature": 1.3}),
    ],
)
def test_the_law_of_what_comes_out_is_the_targets(tree: DraftTree, row: dict[str, Any], drawn: bool) -> None:
    assert largest_error(tree, row, drawn) < 1e-6


class DrawReused(NodeLaw):
    """A sibling is tried with the draw that has refused the one before it."""

    def try_child(self, token: Tensor, is_tried: Tensor) -> Tried:
        draw = self._draw
        tried = super().try_child(token, is_tried)
        self._draw = draw
        return tried


class DraftKept(NodeLaw):
    """A sibling is tried as if it were drawn from the whole draft, and not from what its sibling has left."""

    def try_child(self, token: Tensor, is_tried: Tensor) -> Tried:
        draft = self._draft
        tried = super().try_child(token, is_tried)
        self._draft = draft
        return tried


def mutate(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    if mutant == "target kept":  # for the next sibling, and for the token in place of all
        monkeypatch.setattr(node_law, "residual", lambda target, draft: target)
    else:
        monkeypatch.setattr(tree_rejection, "NodeLaw", {"draw reused": DrawReused, "draft kept": DraftKept}[mutant])


# With whether siblings are draws: of some, residuals take all or nothing, whatever the draw.
MUTANTS = [("target kept", True), ("draw reused", False), ("draft kept", True)]


@pytest.mark.parametrize(("mutant", "drawn"), MUTANTS)
def test_mutants_have_another_law(mutant: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, mutant)
    assert largest_error(TREE, PLAIN, drawn) > 1e-3


def p_value(tokens: Tensor, chain: Chain) -> float:
    """Of the joint distribution of three tokens against plain decoding's; cells pooled to an expectation of 5 and more."""
    n = len(chain.target)
    cells = (tokens * torch.tensor([n * n, n, 1])).sum(dim=1)
    observed, expected = torch.bincount(cells, minlength=n**3).double(), chain.law().flatten() * len(tokens)
    assert observed[expected == 0].sum() == 0, "a filtered token came out"
    enough = expected >= 5
    observed = torch.cat((observed[enough], observed[~enough].sum()[None]))
    expected = torch.cat((expected[enough], expected[~enough].sum()[None]))
    keep = expected > 0
    assert keep.sum() > 40
    return float(stats.chisquare(observed[keep].numpy(), expected[keep].numpy(), sum_check=False).pvalue)


FILTERED = SamplingParams(temperature=0.8, top_k=5, top_p=0.9)


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("row", [SamplingParams(temperature=1.0), FILTERED], ids=["plain", "filtered"])
def test_three_tokens_by_rounds_have_the_joint_distribution_of_plain_decoding(row: SamplingParams, drawn: bool) -> None:
    chain = Chain.make(8, row, spread=1.0)
    assert p_value(decode_by_trees(chain, WIDE, 25_000, 3, drawn=drawn), chain) > 1e-4


@pytest.mark.parametrize(("mutant", "drawn"), MUTANTS)
def test_the_sample_tells_mutants_from_it(mutant: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain.make(8, SamplingParams(temperature=1.0), spread=1.0)
    mutate(monkeypatch, mutant)
    assert p_value(decode_by_trees(chain, WIDE, 25_000, 3, drawn=drawn), chain) < 1e-6
