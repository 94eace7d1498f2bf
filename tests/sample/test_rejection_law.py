from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams
from tests.sample.rounds import build, verify
from tests.sample.speculative_chain import Chain, same_for_all
from tests.sample.test_sampler import filtered


def thresholds(is_below: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """float64 [count]: up to which draw a monotone property holds, by bisection to 2**-32."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(32):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


class Law:
    """The distribution of a round's tokens for several drafts at once, measured from the sampler's outputs alone.

    A token never falls as its draw rises, and a drafted one is accepted up to some draw: all probabilities are thresholds.

    Args:
        logits: [num_drafts, k + 1, vocab_size].
        drafts: [num_drafts, k].
    """

    def __init__(
        self, logits: Tensor, drafts: Tensor, draft_probs: Tensor | None, sampling: SpeculativeSampling
    ) -> None:
        self.num_drafts, self.k = drafts.shape
        self.vocab_size = logits.shape[-1]
        self._inputs = (logits, drafts, draft_probs)
        self._sampling = sampling
        self.accept_probs = torch.stack([self._accept(column) for column in range(self.k)], dim=1)
        self.last_probs = torch.stack([self._last(column) for column in range(self.k + 1)], dim=1)

    def _run(self, repeats: int, accept: Tensor, last: Tensor) -> VerifiedRound:
        """Every draft `repeats` times. accept, last: draws [rows, k] and [rows]."""
        logits, drafts, probs = (None if x is None else x.repeat_interleave(repeats, 0) for x in self._inputs)
        assert logits is not None
        assert drafts is not None
        rows = len(drafts)
        one = self._sampling
        many = replace(
            one,
            **{name: getattr(one, name).expand(rows) for name in ("temperature", "top_k", "top_p")},
            banned_token_ids=None if one.banned_token_ids is None else one.banned_token_ids.expand(rows, -1),
            num_banned_positions=None if one.num_banned_positions is None else one.num_banned_positions.expand(rows),
            accept_draws=accept,
            recovered_draws=last[:, None].expand(-1, self.k),
            token_draws=last[:, None].expand(-1, self.k + 1),
        )
        return RejectionSampler()(logits, drafts, torch.full((rows,), self.k), probs, many)

    def _accept(self, column: int) -> Tensor:
        """[num_drafts]: of the token in this column, once it is reached."""

        def is_below(draws: Tensor) -> Tensor:
            accept = torch.full((self.num_drafts, self.k), -1.0, dtype=torch.float64)  # accepts all
            accept[:, column] = draws
            return self._run(1, accept, draws).num_accepted > column

        return thresholds(is_below, self.num_drafts)

    def _last(self, column: int) -> Tensor:
        """[num_drafts, vocab_size]: of the token that ends the round there."""
        ids = torch.arange(self.vocab_size - 1).repeat(self.num_drafts)

        def is_below(draws: Tensor) -> Tensor:
            accept = torch.full((len(ids), self.k), -1.0, dtype=torch.float64)
            accept[:, column:] = math.inf  # refuses
            output = self._run(self.vocab_size - 1, accept, draws)
            assert (output.num_accepted == column).all()
            return output.token_ids[:, column] <= ids

        cumulative = thresholds(is_below, len(ids)).view(self.num_drafts, -1)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(cumulative, (1, 0)), (0, 1), value=1.0)
        return edges.diff(dim=-1)


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "k", "row"),
    [
        (4, 3, {"temperature": 1.0}),
        (5, 2, {"temperature": 0.6}),
        (5, 2, {"temperature": 1.3, "top_k": 3}),
        (5, 2, {"temperature": 1.0, "top_p": 0.8}),
        (5, 2, {"temperature": 0.9, "top_k": 4, "top_p": 0.9, "min_tokens": 1}),
        (5, 2, {"temperature": 0.0}),
    ],
)
def test_the_law_of_what_comes_out_is_the_targets(
    vocab_size: int, k: int, row: dict[str, Any], point_mass: bool
) -> None:
    """Every draft of a small vocabulary, a distribution of its own at every prefix: the law of k + 1 tokens is the chain's.

    What a round leaves open of the k + 1 tokens is filled up by the target, as further rounds would.
    """
    generator = torch.Generator().manual_seed(7)
    params, banned = SamplingParams(**row), 2
    prefixes = [prefix for n in range(k + 1) for prefix in itertools.product(range(vocab_size), repeat=n)]
    logits = {prefix: 1.5 * torch.randn(vocab_size, generator=generator) for prefix in prefixes}
    draft_logits = {prefix: 1.5 * torch.randn(vocab_size, generator=generator) for prefix in prefixes}

    def target(prefix: tuple[int, ...]) -> Tensor:
        known = logits[prefix].clone()
        if len(prefix) < params.min_tokens:
            known[banned] = -torch.inf
        if params.temperature == 0:
            return torch.nn.functional.one_hot(known.argmax(), vocab_size).double()
        return filtered(known, params.temperature, params.top_k, params.top_p)

    chain = {
        tokens: math.prod(float(target(tokens[:n])[tokens[n]]) for n in range(k + 1))
        for tokens in itertools.product(range(vocab_size), repeat=k + 1)
    }
    drafts = [(2, 1, 3)[:k]] if point_mass else list(itertools.product(range(vocab_size), repeat=k))
    q = {prefix: draft_logits[prefix].softmax(-1) for prefix in prefixes}
    sampling = build([row], k, banned=[(banned,) if params.min_tokens else ()]) if params.temperature else None
    if sampling is None:  # greedy, the way a batch with others has it
        sampling = replace(build([{"temperature": 1.0}], k), temperature=torch.zeros(1))
    draft_probs = None if point_mass else torch.stack([torch.stack([q[d[:n]] for n in range(k)]) for d in drafts])
    law = Law(
        torch.stack([torch.stack([logits[draft[:n]] for n in range(k + 1)]) for draft in drafts]),
        torch.tensor(drafts),
        draft_probs,
        sampling,
    )
    found = dict.fromkeys(chain, 0.0)
    for index, draft in enumerate(drafts):
        reached = 1.0 if point_mass else math.prod(float(q[draft[:n]][draft[n]]) for n in range(k))
        for length in range(k + 1):
            accepted = float(law.accept_probs[index, length]) if length < k else 0.0
            for token in range(vocab_size):
                emitted = (*draft[:length], token)
                share = reached * (1 - accepted) * float(law.last_probs[index, length, token])
                if share < 1e-12:
                    continue
                for rest in itertools.product(range(vocab_size), repeat=k - length):
                    tokens = emitted + rest
                    follows = math.prod(float(target(tokens[:n])[tokens[n]]) for n in range(length + 1, k + 1))
                    found[tokens] += share * follows
            reached *= accepted
    assert max(abs(found[tokens] - chain[tokens]) for tokens in chain) < 1e-6


@pytest.mark.parametrize(
    "row",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_k=5, top_p=0.9)],
    ids=["plain", "filtered"],
)
def test_three_tokens_by_rounds_have_the_joint_distribution_of_plain_decoding(row: SamplingParams) -> None:
    chain, count = Chain.make(8, row, spread=1.0), 60_000
    tokens = chain.speculative(count, seed=3)
    cells = (tokens * torch.tensor([64, 8, 1])).sum(dim=1)
    observed, expected = torch.bincount(cells, minlength=512).double(), chain.law().flatten() * count
    assert observed[expected == 0].sum() == 0, "a filtered token came out"
    enough = expected >= 5
    observed = torch.cat((observed[enough], observed[~enough].sum()[None]))
    expected = torch.cat((expected[enough], expected[~enough].sum()[None]))
    keep = expected > 0
    assert keep.sum() > 40
    assert stats.chisquare(observed[keep].numpy(), expected[keep].numpy(), sum_check=False).pvalue > 1e-4


def test_accept_probabilities_are_those_that_are_reported() -> None:
    torch.manual_seed(2)
    logits, q = torch.randn(6, 3, 9), torch.randn(6, 2, 9).softmax(-1)
    drafts = torch.randint(9, (6, 2))
    sampling = build([{"temperature": 0.8, "top_k": 6}], 2)
    law = Law(logits, drafts, q, sampling)
    rows = replace(
        same_for_all(6, 2, torch.Generator(), SamplingParams(temperature=0.8, top_k=6)), top_k=torch.full((6,), 6)
    )
    output = verify(logits, drafts.tolist(), rows, q)
    assert torch.allclose(output.accept_probs.double(), law.accept_probs, rtol=0, atol=1e-6)
    p = torch.stack([torch.stack([filtered(x, 0.8, 6, 1.0) for x in row[:2]]) for row in logits])
    p = p.gather(-1, drafts[:, :, None])[:, :, 0]
    assert torch.allclose(output.target_probs.double(), p, rtol=0, atol=1e-6)
    assert torch.equal(output.draft_probs, q.gather(-1, drafts[:, :, None])[:, :, 0])
