"""How surely a certificate finds a sampler with a fault, at its default size: in how many of thousands of trials.

So many are quick because their samples are drawn from the law of the faulty sampler, in closed form. That the sampler itself,
with the fault built in, follows that law is tested apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import backend.sample.rejection_sampler as sampler_module
from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.homogeneity import compare_samples
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams
from tests.sample.speculative_chain import Chain

VOCAB_SIZE, NUM_TRIALS = 8, 3000
TRIPLES = list(itertools.product(range(VOCAB_SIZE), repeat=3))
CONFIG = CertificateConfig()


def accept_all(sampling: SpeculativeSampling) -> SpeculativeSampling:
    return replace(sampling, accept_draws=torch.full_like(sampling.accept_draws, -1.0))


@dataclass(frozen=True, slots=True)
class Fault:
    """What a sampler does wrong.

    Attributes:
        draft_probs_filtered: False: it is told the draft's probabilities from before the filters its tokens were drawn with.
    """

    accepts_all: bool = False
    recovers_from_target: bool = False
    draft_probs_filtered: bool = True

    def sample(self, chain: Chain, num_rows: int, seed: int) -> np.ndarray:
        """int64 [512]: how often the sampler gave each triple."""
        mutation: Callable[[SpeculativeSampling], SpeculativeSampling] = (
            accept_all if self.accepts_all else lambda sampling: sampling
        )
        with pytest.MonkeyPatch.context() as patch:
            if self.recovers_from_target:
                patch.setattr(sampler_module, "residual", lambda target, draft: target)
            tokens = chain.speculative(
                num_rows, seed, mutation=mutation, draft_probs_filtered=self.draft_probs_filtered
            )
        places = tokens @ torch.tensor([VOCAB_SIZE**2, VOCAB_SIZE, 1])
        return np.bincount(places.numpy(), minlength=len(TRIPLES))

    def law(self, chain: Chain) -> np.ndarray:
        """float64 [512], of rounds of two drafted tokens: each accepted or recovered, and a bonus token behind both."""
        target, draft = chain.target_probs(), replace(chain, target=chain.draft).target_probs()
        told = draft if self.draft_probs_filtered else (chain.draft.double() / chain.row.temperature).softmax(dim=-1)
        acceptance = (target / told).clamp(max=1).where(told > 0, 1.0)
        accepted = draft if self.accepts_all else draft * acceptance
        residual = (target - told).clamp(min=0)
        recovery = target if self.recovers_from_target else residual / residual.sum(dim=-1, keepdim=True).clamp(1e-300)
        recovered = (1 - accepted.sum(dim=-1, keepdim=True)).clamp(min=0) * recovery
        either = accepted + recovered
        triples = (
            _joint(accepted, accepted, target) + _joint(accepted, recovered, either) + _joint(recovered, either, either)
        )
        return triples.flatten().numpy()


def _joint(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """[8, 8, 8] of tables by the last token, behind token 0."""
    return first[0][:, None, None] * second[:, :, None] * third[None, :, :]


RIGHT = Fault()
FAULTS = {
    "always accepts": Fault(accepts_all=True),
    "recovers from the target instead of the residual": Fault(recovers_from_target=True),
    "a draft's probabilities from before the filters": Fault(draft_probs_filtered=False),
}


@pytest.fixture(scope="module")
def chain() -> Chain:
    """A draft that is accepted about two times out of three, both filtered as the certificate does by default."""
    row = SamplingParams(temperature=1.0, top_k=5, top_p=0.95)
    chain = Chain.make(VOCAB_SIZE, row, likeness=0.7, spread=1.0, k=2)
    target, draft = chain.target_probs(), replace(chain, target=chain.draft).target_probs()
    assert 0.6 < float(torch.minimum(target, draft).sum(dim=-1).mean()) < 0.7
    return chain


def num_rejected(plain: np.ndarray, speculative: np.ndarray, seed: int) -> int:
    """Of trials with samples of their own of these two laws, divided among as many prompts as by default."""
    generator = np.random.default_rng(seed)
    num_samples = CONFIG.num_samples // CONFIG.num_sampled_prompts

    def samples(law: np.ndarray) -> list[tuple[int, ...]]:
        counts = generator.multinomial(num_samples, law / law.sum())
        return [TRIPLES[place] for place in np.repeat(np.arange(len(TRIPLES)), counts)]

    def is_rejected() -> bool:
        strata = [(samples(plain), samples(speculative)) for _ in range(CONFIG.num_sampled_prompts)]
        return bool(compare_samples(strata, CONFIG.significance).rejections)

    return sum(is_rejected() for _ in range(NUM_TRIALS))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_with_a_power_above_99_per_cent(chain: Chain, fault: Fault) -> None:
    """By the exact bound of Clopper and Pearson 1934: so many found would be less likely than 1 % at any smaller power."""
    found = stats.binomtest(num_rejected(RIGHT.law(chain), fault.law(chain), seed=1), NUM_TRIALS, alternative="greater")
    assert found.proportion_ci(confidence_level=0.99).low > 0.99, found


def test_a_sampler_without_a_fault_is_rejected_no_more_often_than_is_said(chain: Chain) -> None:
    num_found = num_rejected(RIGHT.law(chain), RIGHT.law(chain), seed=2)
    assert stats.binomtest(num_found, NUM_TRIALS, CONFIG.significance, alternative="greater").pvalue > 1e-3


def test_without_a_fault_the_law_is_that_of_plain_decoding(chain: Chain) -> None:
    """Leviathan et al. 2023, theorem 1; and of each fault it is another one."""
    plain = chain.law().flatten().numpy()
    np.testing.assert_allclose(RIGHT.law(chain), plain, atol=1e-12)
    for name, fault in FAULTS.items():
        assert fault.law(chain).sum() == pytest.approx(1), name
        assert abs(fault.law(chain) - plain).sum() / 2 > 0.05, name


@pytest.mark.parametrize("fault", [RIGHT, *FAULTS.values()], ids=["none", *FAULTS])
def test_the_sampler_follows_the_law(chain: Chain, fault: Fault) -> None:
    """Pearson's χ² test of fit; what is expected too seldom is one cell."""
    num_rows, law = 50 * CONFIG.num_samples, fault.law(chain)
    counts = fault.sample(chain, num_rows, seed=3)
    assert not counts[law < 1e-15].any(), "impossible triples"
    cells = np.where(law * num_rows >= 5, np.arange(len(law)), len(law))
    expected, observed = np.bincount(cells, law * num_rows), np.bincount(cells, counts)
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3
