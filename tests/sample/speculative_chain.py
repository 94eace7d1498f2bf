"""A target and a draft whose next-token logits depend on the last token alone: whole batches decode by table look-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.sample.filtering import draw_tokens, filtered_weights, probabilities
from backend.sample.metadata import SamplingMetadata
from backend.sample.rejection_sampler import RejectionSampler
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams
from tests.sample.test_sampler import filtered

NUM_TOKENS = 3
Mutation = Callable[[SpeculativeSampling], SpeculativeSampling]


def same_for_all(num_rows: int, k: int, generator: torch.Generator, row: SamplingParams) -> SpeculativeSampling:
    """Draws from a generator: as random as the counter-based ones, and quick for a hundred thousand rows."""
    sampling = SpeculativeSampling.build(SamplingMetadata([row], [0], [()]), k, torch.device("cpu"))
    assert sampling is not None
    draws = torch.rand(3, num_rows, k + 1, generator=generator, dtype=torch.float64)
    return replace(
        sampling,
        temperature=sampling.temperature.expand(num_rows),
        top_k=sampling.top_k.expand(num_rows),
        top_p=sampling.top_p.expand(num_rows),
        accept_draws=draws[0, :, :k],
        recovered_draws=draws[1, :, :k],
        token_draws=draws[2],
    )


@dataclass(frozen=True)
class Chain:
    """Tables of logits, [vocab_size, vocab_size] by the last token; every text begins after token 0."""

    target: Tensor
    draft: Tensor
    row: SamplingParams
    k: int = 3

    @staticmethod
    def make(
        vocab_size: int, row: SamplingParams, *, likeness: float = 0.7, spread: float = 1.5, seed: int = 0, k: int = 3
    ) -> Chain:
        """A draft that resembles its target: equal at a likeness of 1, unrelated at 0."""
        generator = torch.Generator().manual_seed(seed)
        target, other = spread * torch.randn(2, vocab_size, vocab_size, generator=generator)
        return Chain(target, likeness * target + (1 - likeness**2) ** 0.5 * other, row, k)

    def target_probs(self) -> Tensor:
        """float64 [vocab_size, vocab_size], by transformers' processors."""
        return torch.stack([filtered(row, self.row.temperature, self.row.top_k, self.row.top_p) for row in self.target])

    def law(self) -> Tensor:
        """float64 [vocab_size] * 3, of the first three tokens of plain decoding."""
        p = self.target_probs()
        return p[0][:, None, None] * p[:, :, None] * p[None, :, :]

    def plain(self, num_rows: int, seed: int) -> Tensor:
        """int64 [num_rows, 3], by torch's own draws."""
        generator = torch.Generator().manual_seed(seed)
        probs, last, tokens = self.target_probs(), torch.zeros(num_rows, dtype=torch.int64), []
        for _ in range(NUM_TOKENS):
            last = probs[last].multinomial(1, generator=generator)[:, 0]
            tokens.append(last)
        return torch.stack(tokens, dim=1)

    def speculative(
        self,
        num_rows: int,
        seed: int,
        *,
        mutation: Mutation = lambda sampling: sampling,
        draft_probs_filtered: bool = True,
    ) -> Tensor:
        """int64 [num_rows, 3], by rounds of k drafted tokens; the sampler may be given wrong inputs."""
        generator = torch.Generator().manual_seed(seed)
        drawn_from = self._draft_weights(self.row)
        told = (
            drawn_from
            if draft_probs_filtered
            else self._draft_weights(SamplingParams(temperature=self.row.temperature))
        )
        told = probabilities(told)
        tokens = torch.zeros(num_rows, NUM_TOKENS + self.k + 1, dtype=torch.int64)  # the first is token 0
        count = torch.zeros(num_rows, dtype=torch.int64)
        while len(open_rows := (count < NUM_TOKENS).nonzero()[:, 0]):
            place = count[open_rows, None]
            places, drafted = [tokens[open_rows].gather(1, place)[:, 0]], []
            for _ in range(self.k):
                draws = torch.rand(len(open_rows), generator=generator, dtype=torch.float64)
                drafted.append(draw_tokens(drawn_from[places[-1]], draws))
                places.append(drafted[-1])
            output = RejectionSampler()(
                self.target[torch.stack(places, dim=1)],
                torch.stack(drafted, dim=1),
                torch.full((len(open_rows),), self.k),
                told[torch.stack(places[:-1], dim=1)],
                mutation(same_for_all(len(open_rows), self.k, generator, self.row)),
            )
            tokens[open_rows[:, None], place + 1 + torch.arange(self.k + 1)] = output.token_ids
            count[open_rows] += output.num_accepted + 1
        return tokens[:, 1 : NUM_TOKENS + 1]

    def _draft_weights(self, row: SamplingParams) -> Tensor:
        n = len(self.draft)
        return filtered_weights(
            self.draft,
            torch.full((n,), row.temperature),
            torch.full((n,), row.top_k, dtype=torch.int32),
            torch.full((n,), row.top_p),
            filters=True,
        )
