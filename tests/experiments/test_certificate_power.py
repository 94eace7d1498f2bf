"""How surely a certificate finds a sampler with a fault, at its default size: in how many of a thousand trials or more.

So many are quick because their samples are drawn from the law of the faulty sampler, in closed form. That the sampler itself,
with the fault built in, follows that law is tested apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import one_hot

import backend.sample.rejection_sampler as sampler_module
from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.homogeneity import compare_samples
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams
from tests.sample.speculative_chain import Chain

VOCAB_SIZE = 8
TRIPLES = list(itertools.product(range(VOCAB_SIZE), repeat=3))
CONFIG = CertificateConfig()


@dataclass(frozen=True, slots=True)
class Fault:
    """What a sampler does wrong.

    Attributes:
        accepts_from: index in a draft from which on every token is accepted, 0 or 2; None: it errs nowhere.
        draft_probs_filtered: False: it is told the draft's probabilities from before the filters its tokens were drawn with.
        bonus_drawn: False: the bonus token is the first that the filters leave.
        power: how surely it is found at the least.
    """

    accepts_from: int | None = None
    recovers_from_target: bool = False
    draft_probs_filtered: bool = True
    bonus_drawn: bool = True
    power: float = 0.99

    def sample(self, chain: Chain, num_rows: int, seed: int) -> np.ndarray:
        """int64 [512]: how often the sampler gave each triple."""
        with pytest.MonkeyPatch.context() as patch:
            if self.recovers_from_target:
                patch.setattr(sampler_module, "residual", lambda target, draft: target)
            tokens = chain.speculative(
                num_rows, seed, mutation=self._mutate, draft_probs_filtered=self.draft_probs_filtered
            )
        places = tokens @ torch.tensor([VOCAB_SIZE**2, VOCAB_SIZE, 1])
        return np.bincount(places.numpy(), minlength=len(TRIPLES))

    def _mutate(self, sampling: SpeculativeSampling) -> SpeculativeSampling:
        accept, token = sampling.accept_draws.clone(), sampling.token_draws
        if self.accepts_from is not None:
            accept[:, self.accepts_from :] = -1.0
        return replace(sampling, accept_draws=accept, token_draws=token if self.bonus_drawn else 0 * token)

    def law(self, chain: Chain) -> np.ndarray:
        """float64 [512], of rounds of two or three drafted tokens: each accepted or recovered, and a bonus token behind all."""
        target, draft = chain.target_probs(), replace(chain, target=chain.draft).target_probs()
        told = draft if self.draft_probs_filtered else (chain.draft.double() / chain.row.temperature).softmax(dim=-1)
        acceptance = (target / told).clamp(max=1).where(told > 0, 1.0)
        accepted = draft if self.accepts_from == 0 else draft * acceptance
        residual = (target - told).clamp(min=0)
        recovery = target if self.recovers_from_target else residual / residual.sum(dim=-1, keepdim=True).clamp(1e-300)
        recovered = (1 - accepted.sum(dim=-1, keepdim=True)).clamp(min=0) * recovery
        either = accepted + recovered
        bonus = target if self.bonus_drawn else one_hot((target > 0).long().argmax(dim=-1), VOCAB_SIZE).double()
        behind_two = bonus if chain.k == 2 else either if self.accepts_from is None else draft
        triples = (
            _joint(accepted, accepted, behind_two)
            + _joint(accepted, recovered, either)
            + _joint(recovered, either, either)
        )
        return triples.flatten().numpy()


def _joint(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """[8, 8, 8] of tables by the last token, behind token 0."""
    return first[0][:, None, None] * second[:, :, None] * third[None, :, :]


RIGHT = Fault()
FAULTS = {
    "always accepts": Fault(accepts_from=0),
    "recovers from the target instead of the residual": Fault(recovers_from_target=True),
    "a draft's probabilities from before the filters": Fault(draft_probs_filtered=False),
    "the bonus token is not drawn": Fault(bonus_drawn=False),
    "accepts from the third on": Fault(accepts_from=2, power=0.85),
}


@pytest.fixture(scope="module")
def chains() -> tuple[Chain, Chain]:
    """Rounds of the two kinds that a certificate compares, with room for two drafted tokens and for all of them; three are as
    good as more.

    A draft that is accepted about two times out of three, both filtered as the certificate does by default.
    """
    row = SamplingParams(temperature=1.0, top_k=5, top_p=0.95)
    chain = Chain.make(VOCAB_SIZE, row, likeness=0.7, spread=1.0, k=2)
    target, draft = chain.target_probs(), replace(chain, target=chain.draft).target_probs()
    assert 0.6 < float(torch.minimum(target, draft).sum(dim=-1).mean()) < 0.7
    return chain, replace(chain, k=3)


def num_rejected(chains: tuple[Chain, Chain], fault: Fault, seed: int, num_trials: int) -> int:
    """Of trials with samples of their own, divided among as many prompts as by default, and those of each among the chains."""
    generator = np.random.default_rng(seed)
    share = CONFIG.num_samples // CONFIG.num_sampled_prompts // 2
    laws = [[each.law(chain) for chain in chains] for each in (RIGHT, fault)]

    def samples(of_both: list[np.ndarray]) -> list[tuple[int, ...]]:
        counts = sum(generator.multinomial(share, law / law.sum()) for law in of_both)
        return [TRIPLES[place] for place in np.repeat(np.arange(len(TRIPLES)), counts)]

    def is_rejected() -> bool:
        strata = [(samples(laws[0]), samples(laws[1])) for _ in range(CONFIG.num_sampled_prompts)]
        return bool(compare_samples(strata, CONFIG.significance).rejections)

    return sum(is_rejected() for _ in range(num_trials))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_with_the_power_that_is_said(chains: tuple[Chain, Chain], fault: Fault) -> None:
    """By the exact bound of Clopper and Pearson 1934: so many found would be less likely than 1 % at any smaller power.

    Of fewer trials, that more of them must have been found is what makes up for it.
    """
    num_trials = 1000
    found = stats.binomtest(num_rejected(chains, fault, 1, num_trials), num_trials, alternative="greater")
    assert found.proportion_ci(confidence_level=0.99).low > fault.power, found


def test_a_sampler_without_a_fault_is_rejected_no_more_often_than_is_said(chains: tuple[Chain, Chain]) -> None:
    num_trials = 3000
    num_found = num_rejected(chains, RIGHT, 2, num_trials)
    assert stats.binomtest(num_found, num_trials, CONFIG.significance, alternative="greater").pvalue > 1e-3


def test_without_a_fault_the_law_is_that_of_plain_decoding(chains: tuple[Chain, Chain]) -> None:
    """Leviathan et al. 2023, theorem 1; and of each fault it is another one, with one kind of rounds or both."""
    plain = chains[0].law().flatten().numpy()
    for chain in chains:
        np.testing.assert_allclose(RIGHT.law(chain), plain, atol=1e-12)
    for name, fault in FAULTS.items():
        laws = [fault.law(chain) for chain in chains]
        assert [law.sum() for law in laws] == pytest.approx([1, 1]), name
        assert max(abs(law - plain).sum() / 2 for law in laws) > 0.05, name


def test_neither_kind_of_rounds_shows_every_fault(chains: tuple[Chain, Chain]) -> None:
    """Two drafted tokens leave out the test of a third; behind three the bonus token is a fourth."""
    plain = chains[0].law().flatten().numpy()
    for chain, name in zip(chains, ("accepts from the third on", "the bonus token is not drawn"), strict=True):
        np.testing.assert_allclose(FAULTS[name].law(chain), plain, atol=1e-12)


@pytest.mark.parametrize("fault", [RIGHT, *FAULTS.values()], ids=["none", *FAULTS])
@pytest.mark.parametrize("which", [0, 1], ids=["room for two", "room for all"])
def test_the_sampler_follows_the_law(chains: tuple[Chain, Chain], which: int, fault: Fault) -> None:
    """Pearson's χ² test of fit; what is expected too seldom is one cell."""
    chain = chains[which]
    num_rows, law = 50 * CONFIG.num_samples, fault.law(chain)
    counts = fault.sample(chain, num_rows, seed=3)
    assert not counts[law < 1e-15].any(), "impossible triples"
    cells = np.where(law * num_rows >= 5, np.arange(len(law)), len(law))
    expected, observed = np.bincount(cells, law * num_rows), np.bincount(cells, counts)
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3
