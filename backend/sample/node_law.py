"""`NodeLaw`: the distributions at one node of a draft tree, as its children are tried one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backend.sample.filtering import draw_tokens, filtered_weights, probabilities
from backend.sample.rejection_sampler import residual
from backend.sample.sampler import SamplerOps
from backend.sample.speculative_sampling import SpeculativeSampling
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE


class Tried(NamedTuple):
    """What became of one child of each row's node: [num_rows]; probabilities 0 where it was not tried."""

    is_accepted: Tensor
    target_prob: Tensor
    draft_prob: Tensor
    accept_prob: Tensor


class NodeLaw:
    """What the target and the draft are at the node where each row stands, and what is left of them; see `tree_rejection`.

    Args:
        logits: float32 [num_rows, num_nodes, vocab_size], of the target.
        best: int64 [num_rows, num_nodes], their greedy choices.
        draft_probs: float32 [num_rows, num_inner, vocab_size]; None: point masses.
        inner_place: int64 [num_nodes], where a node's children have their distribution.
        sampling: None: every row is greedy.
    """

    def __init__(
        self,
        logits: Tensor,
        best: Tensor,
        draft_probs: Tensor | None,
        inner_place: Tensor,
        sampling: SpeculativeSampling | None,
    ) -> None:
        self._logits = logits
        self._best = best
        self._draft_probs = draft_probs
        self._inner_place = inner_place
        self._sampling = sampling
        self._is_greedy = None if sampling is None else sampling.temperature < GREEDY_TEMPERATURE
        self._token_ids = torch.arange(logits.shape[-1], device=logits.device)
        self._last: tuple[Tensor, Tensor] | None = None  # weights and draw of each row's last token
        self._is_plain = torch.ones_like(best[:, 0], dtype=torch.bool)  # whether that is a plain draw

    def begin(self, node: Tensor, depth: int) -> None:
        """Every row stands at a node, of this depth where it is still open."""
        self._row = of_node(self._logits, node)
        self._log_sum = self._row.logsumexp(dim=-1)
        self._choice = of_node(self._best, node)
        self._depth = depth
        if self._draft_probs is not None:
            self._draft = of_node(self._draft_probs, self._inner_place[node]).float()
        sampling = self._sampling
        if sampling is None:
            return
        filters = (sampling.temperature, sampling.top_k, sampling.top_p)
        self._weights = filtered_weights(self._row, *filters, filters=sampling.filters)
        self._sum = _sums(self._weights)
        # What refused children have left of the target, and its sum.
        self._left = self._weights / self._sum[:, None]
        self._total = torch.ones_like(self._sum)
        self._is_refused = torch.zeros_like(self._is_plain)
        if depth < sampling.accept_draws.shape[1]:
            self._draw = sampling.accept_draws[:, depth]

    def try_child(self, token: Tensor, is_tried: Tensor) -> Tried:
        """Accept or refuse a token, int64 [num_rows], in these rows."""
        target = (of_node(self._row, token) - self._log_sum).exp()
        is_best = token == self._choice
        q = torch.ones_like(target) if self._draft_probs is None else of_node(self._draft, token)
        if self._is_greedy is None:
            return Tried(is_best & is_tried, *(x.where(is_tried, 0) for x in (target, q, is_best.float())))
        p = of_node(self._left, token) / self._total
        # A draft that had no token left to draw has drawn none.
        accept = (p.double() / q.double()).clamp(max=1).where(q > 0, 0)
        is_accepted = (self._draw * q < p) & (q > 0)
        is_accepted = is_best.where(self._is_greedy, is_accepted) & is_tried
        is_refused = is_tried & ~is_accepted & ~self._is_greedy & (q > 0)
        self._refuse(token, is_refused)
        # Of a draw that refuses, what lies above is uniform again.
        self._draw = ((self._draw - accept) / (1 - accept)).clamp(0, 1 - 2**-53).where(is_refused, self._draw)
        self._is_refused = self._is_refused | is_refused
        target = target.where(self._is_greedy, of_node(self._weights, token) / self._sum)
        accept = is_best.double().where(self._is_greedy, accept).float()
        return Tried(is_accepted, *(x.where(is_tried, 0) for x in (target, q, accept)))

    def _refuse(self, token: Tensor, is_refused: Tensor) -> None:
        if self._draft_probs is None:  # a point mass leaves all but the token, and that without a pass over the rest
            held, place = of_node(self._left, token), token[:, None]
            self._left.scatter_(1, place, held.where(~is_refused, 0)[:, None])
            total = _sums(self._left)
            # Where rounding leaves nothing, see `residual`.
            self._left.scatter_add_(1, place, held.where(is_refused & (total == 0), 0)[:, None])
            self._total = torch.where(total == 0, held, total).where(is_refused, self._total)
            return
        refused = is_refused[:, None]
        self._left = residual(self._left / self._total[:, None], self._draft).where(refused, self._left)
        self._total = _sums(self._left).where(is_refused, self._total)
        is_token = self._token_ids == token[:, None]
        self._draft = probabilities(self._draft.masked_fill(is_token, 0)).where(refused, self._draft)

    def end(self, stops: Tensor) -> None:
        """These rows go no deeper: here they get their last token."""
        sampling = self._sampling
        if sampling is None:
            return
        weights, draw = self._weights, sampling.token_draws[:, self._depth]
        if self._depth < sampling.recovered_draws.shape[1]:
            weights = self._left.where(self._is_refused[:, None], weights)
            draw = sampling.recovered_draws[:, self._depth].where(self._is_refused, draw)
        if self._last is not None:
            weights, draw = weights.where(stops[:, None], self._last[0]), draw.where(stops, self._last[1])
        self._last = weights, draw
        self._is_plain = (~self._is_refused).where(stops, self._is_plain)

    def last_token(self, node: Tensor, num_accepted: Tensor, ops: SamplerOps | None) -> Tensor:
        """int64 [num_rows]."""
        sampling = self._sampling
        if sampling is None or self._last is None:
            return of_node(self._best, node)
        last = draw_tokens(*self._last)
        if ops is None:
            return last
        draws = of_node(sampling.token_draws, num_accepted)
        filters = (sampling.temperature, sampling.top_k, sampling.top_p)
        plain, _ = ops.sample_tokens(of_node(self._logits, node), *filters, draws)
        return plain.where(self._is_plain, last)


def _sums(weights: Tensor) -> Tensor:
    """float32 [num_rows], as `probabilities` divides by them."""
    return weights.sum(dim=-1, dtype=torch.float64).float()


def of_node(values: Tensor, index: Tensor) -> Tensor:
    """Of each row of `values` [num_rows, n, ...] the one at its index, int64 [num_rows]."""
    if values.dim() == 2:
        return values.gather(1, index[:, None])[:, 0]
    return values.gather(1, index[:, None, None].expand(-1, 1, values.shape[-1]))[:, 0]
