"""`RejectionSampler`: a target's logits and a draft to the tokens that the target would have given.

Speculative sampling as in Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (ICML 2023),
and Chen et al., "Accelerating large language model decoding with speculative sampling" (2023). A drafted token x is accepted
with probability min(1, target(x) / draft(x)); the first that is not is recovered from max(0, target - draft), normalized; after
a draft that is accepted whole comes a bonus token from the target. Each token then has the target's distribution, whatever the
draft's is, provided that

- `draft` is the distribution that the token was really drawn from, after the draft's own temperature and filters; and
- how many tokens are drafted follows from what comes before them: a draft that is cut short because of the very token that it
  leaves out would favour the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.sample.filtering import draw_tokens, filtered_weights, probabilities
from backend.sample.sampler import SamplerOps
from backend.sample.speculative_sampling import SpeculativeSampling
from kernels.reference.greedy_tokens import greedy_tokens
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """On the logits' device, perhaps not computed yet: reading a tensor waits for it. Padding positions hold 0.

    Attributes:
        token_ids: int64 [num_rows, k + 1], the accepted tokens, then the recovered or bonus token, then -1.
        num_accepted: int64 [num_rows], of the drafted tokens.
        target_probs: float32 [num_rows, k], of each drafted token; of a greedy row at temperature 1, where its logit stands.
        draft_probs: float32 [num_rows, k], likewise; 1 where the draft is a point mass.
        accept_probs: float32 [num_rows, k], that it is accepted once it is reached; of a greedy row 1 or 0.
        finite: bool [num_rows]; False: the row had no usable logits where they were needed, and its tokens mean nothing.
    """

    token_ids: Tensor
    num_accepted: Tensor
    target_probs: Tensor
    draft_probs: Tensor
    accept_probs: Tensor
    finite: Tensor


class RejectionSampler:
    """Nothing here waits for the device or asks for a value: it may be recorded in a CUDA graph.

    A row that has drafted nothing gets the token of `Sampler`, and so does the bonus position of every other. A position's
    target distribution is that of `kernels.reference.sample_tokens`, without the ids that are banned there.

    Args:
        ops: kernels for the greedy choice and the plain draw, so that those tokens are the kernels' own to the bit; by default
            both are computed in plain torch, which on a CPU is to the bit what the reference gives.
    """

    def __init__(self, ops: SamplerOps | None = None) -> None:
        self._ops = ops

    def __call__(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        sampling: SpeculativeSampling | None,
    ) -> VerifiedRound:
        """Verify a draft for each row. Nothing is mutated.

        Args:
            target_logits: float [num_rows, k + 1, vocab_size], at the positions of the drafted tokens and the one after them.
            draft_token_ids: int64 [num_rows, k], k at least 1.
            num_draft_tokens: int64 [num_rows], 0 to k; positions from there on are padding, whatever they hold.
            draft_probs: float32 [num_rows, k, vocab_size], what each token was drawn from; None: it was no draw.
            sampling: None: every row is greedy.
        Raises:
            ValueError: a shape is not as above.
        """
        _check(target_logits, draft_token_ids, num_draft_tokens, draft_probs, sampling)
        num_rows, k = draft_token_ids.shape
        vocab_size = target_logits.shape[-1]
        logits = _ban(target_logits.float(), sampling)
        flat = logits.reshape(-1, vocab_size)
        columns = torch.arange(k + 1, device=logits.device)
        is_drafted = columns[:k] < num_draft_tokens[:, None]
        drafted = draft_token_ids.where(is_drafted, 0)[:, :, None]
        if draft_probs is None:
            q = torch.ones_like(draft_token_ids, dtype=torch.float32)
        else:
            q = draft_probs.gather(-1, drafted)[:, :, 0].float()
        best, is_finite = (self._ops.greedy_tokens if self._ops else greedy_tokens)(flat)
        best, is_finite = best.view(num_rows, k + 1), is_finite.view(num_rows, k + 1)
        p = (logits[:, :k].gather(-1, drafted)[:, :, 0] - logits[:, :k].logsumexp(dim=-1)).exp()

        if sampling is None or not sampling.samples:
            is_accepted = drafted[:, :, 0] == best[:, :k]
            accept_probs = is_accepted.float()
            num_accepted = count_accepted(is_accepted & is_finite[:, :k] & is_drafted)
            last = best.gather(1, num_accepted[:, None])[:, 0]
        else:
            rows = (sampling.temperature, sampling.top_k, sampling.top_p)
            repeated = (row.repeat_interleave(k + 1, output_size=num_rows * (k + 1)) for row in rows)
            weights = filtered_weights(flat, *repeated, filters=sampling.filters).view(logits.shape)
            sums = weights[:, :k].sum(dim=-1, dtype=torch.float64).float()
            sampled = weights[:, :k].gather(-1, drafted)[:, :, 0] / sums
            is_accepted = sampling.accept_draws * q < sampled.double()
            accept_probs = torch.where(q > 0, (sampled / q).clamp(max=1), (sampled > 0).float())
            num_accepted = count_accepted(is_accepted & is_finite[:, :k] & is_drafted)
            is_greedy = (sampling.temperature < GREEDY_TEMPERATURE)[:, None]
            p = p.where(is_greedy, sampled)
            last = self._draw_last(
                logits, weights, drafted[:, :, 0], num_draft_tokens, num_accepted, draft_probs, sampling
            )

        return VerifiedRound(
            token_ids=round_tokens(draft_token_ids, num_accepted, last, columns),
            num_accepted=num_accepted,
            target_probs=p.where(is_drafted, 0),
            draft_probs=q.where(is_drafted, 0),
            accept_probs=accept_probs.where(is_drafted, 0),
            finite=(is_finite | (columns > num_accepted[:, None])).all(dim=-1),
        )

    def _draw_last(
        self,
        logits: Tensor,
        weights: Tensor,
        drafted: Tensor,
        num_draft_tokens: Tensor,
        num_accepted: Tensor,
        draft_probs: Tensor | None,
        sampling: SpeculativeSampling,
    ) -> Tensor:
        """The token behind the accepted ones: recovered where one was refused, else the bonus. int64 [num_rows]."""
        is_bonus = num_accepted == num_draft_tokens
        plain = _at(weights, num_accepted)
        refused = num_accepted.clamp(max=drafted.shape[1] - 1)
        target = probabilities(plain)
        if draft_probs is None:
            ids = torch.arange(logits.shape[-1], device=logits.device)
            draft = (ids == drafted.gather(1, refused[:, None])).float()
        else:
            draft = _at(draft_probs, refused).float()
        recovered = residual(target, draft)
        token_draws = sampling.token_draws.gather(1, num_accepted[:, None])[:, 0]
        recovered_draws = sampling.recovered_draws.gather(1, refused[:, None])[:, 0]
        last = draw_tokens(plain.where(is_bonus[:, None], recovered), token_draws.where(is_bonus, recovered_draws))
        if self._ops is None:
            return last
        row = _at(logits, num_accepted)
        bonus, _ = self._ops.sample_tokens(row, sampling.temperature, sampling.top_k, sampling.top_p, token_draws)
        return bonus.where(is_bonus, last)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Weights of what a refused token is recovered from: max(0, target - draft).

    Where rounding leaves nothing of them, the two are the same distribution and a refusal is rounding as well: the target's.

    Args:
        target, draft: float32 [num_rows, vocab_size], probabilities.
    """
    weights = (target - draft).clamp(min=0)
    return weights.where((weights > 0).any(dim=-1, keepdim=True), target)


def round_tokens(draft_token_ids: Tensor, num_accepted: Tensor, last: Tensor, columns: Tensor) -> Tensor:
    """A round's tokens, int64 [num_rows, k + 1]: the accepted ones of int64 [num_rows, k], then the last, then `NO_TOKEN`.

    Args:
        columns: int64 [k + 1], counting up from 0.
    """
    token_ids = torch.nn.functional.pad(draft_token_ids, (0, 1)).where(columns < num_accepted[:, None], last[:, None])
    return token_ids.where(columns <= num_accepted[:, None], NO_TOKEN)


def count_accepted(is_accepted: Tensor) -> Tensor:
    """How many columns, from the first on, hold."""
    return is_accepted.long().cumprod(dim=-1).sum(dim=-1)


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """[num_rows, vocab_size]: each row at a position of its own."""
    return rows.gather(1, positions[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


def _ban(logits: Tensor, sampling: SpeculativeSampling | None) -> Tensor:
    """The logits with those of banned ids at -inf."""
    if sampling is None or sampling.banned_token_ids is None or sampling.num_banned_positions is None:
        return logits
    num_positions = logits.shape[1]
    ids = sampling.banned_token_ids[:, None, :].expand(-1, num_positions, -1)
    is_banned = torch.arange(num_positions, device=logits.device) < sampling.num_banned_positions[:, None]
    return logits.scatter(-1, ids, logits.gather(-1, ids).masked_fill(is_banned[:, :, None], -torch.inf))


def _check(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    sampling: SpeculativeSampling | None,
) -> None:
    num_rows, num_positions, vocab_size = target_logits.shape
    k = num_positions - 1
    if k < 1:
        raise ValueError(
            f"target_logits has {num_positions} positions; one drafted token and the one after it are the least"
        )
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("draft_token_ids", draft_token_ids, (num_rows, k)),
        ("num_draft_tokens", num_draft_tokens, (num_rows,)),
        ("draft_probs", draft_probs, (num_rows, k, vocab_size)),
        ("accept_draws", sampling and sampling.accept_draws, (num_rows, k)),
        ("recovered_draws", sampling and sampling.recovered_draws, (num_rows, k)),
        ("token_draws", sampling and sampling.token_draws, (num_rows, k + 1)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; {shape} belongs to target_logits {tuple(target_logits.shape)}"
            )
