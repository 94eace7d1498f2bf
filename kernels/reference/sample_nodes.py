"""What sampled rows draw behind each node of their drafts, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.next_draws import uniform
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE

MAX_NODES = 64
NOT_SAMPLED = -1


class SampledNodes(NamedTuple):
    """What `sample_nodes` finds."""

    # int64 [num_rows, num_nodes], the token behind each node; -1: the row is greedy, or has no usable logits there.
    token_ids: Tensor
    # float32 [num_rows, num_nodes - 1], of each drafted token behind its parent, after the row's filters; 0 of a greedy row, of
    # padding, and where the parent has no usable logits.
    probs: Tensor


def sample_nodes(
    logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    num_prompt_tokens: Tensor,
    num_computed: Tensor,
) -> SampledNodes:
    """The token that plain decoding would draw behind each node of a row's drafts, and how likely each draft was there.

    Of each node the token of `sample_tokens`, with the draw of (seed, output position, token) that Philox4x32-10 gives. The
    output position of a row's root is `num_computed + 1 - num_prompt_tokens`, of what is behind a node by its depth more.

    Args:
        logits: float32 [num_rows * num_nodes, vocab_size], behind each node, the root first
        draft_token_ids: int64 [num_rows, num_nodes - 1], of the nodes from 1 on; one outside the vocabulary is padding
        parents: int64 [num_nodes], of each node an earlier one; -1 of the root. A chain's are -1, 0, 1 and so on.
        depths: int64 [num_nodes], of each node; 0 of the root
        temperature: float32 [num_rows]; below 1e-5 the row is greedy
        top_k: int32 [num_rows]; below 1, or vocab_size and more: off
        top_p: float32 [num_rows], above 0; 1 and more: off
        seeds: int64 [num_rows], the bits of an unsigned one
        num_prompt_tokens, num_computed: int64 [num_rows]; the latter are the tokens before each row's last one
    Returns:
        `SampledNodes`; nothing is mutated.
    """
    num_rows, num_nodes, vocab_size = len(temperature), len(parents), logits.shape[1]

    def of_nodes(values: Tensor) -> Tensor:
        return values.repeat_interleave(num_nodes, output_size=num_rows * num_nodes)

    is_sampled = of_nodes(temperature >= GREEDY_TEMPERATURE) & logits.amax(dim=-1).isfinite()
    weights = _filtered(logits, of_nodes(temperature), of_nodes(top_k), of_nodes(top_p))
    positions = (num_computed + 1 - num_prompt_tokens)[:, None] + depths
    draws = uniform(of_nodes(seeds), positions.flatten())
    token_ids = _draw(weights, draws).where(is_sampled, NOT_SAMPLED).view(num_rows, num_nodes)

    is_token = (draft_token_ids >= 0) & (draft_token_ids < vocab_size)
    drafts = draft_token_ids.where(is_token, 0)
    behind = parents[1:]
    by_node, totals = weights.view(num_rows, num_nodes, vocab_size), weights.sum(dim=-1, dtype=torch.float64)
    held = by_node[:, behind].gather(-1, drafts[:, :, None])[:, :, 0]
    probs = (held / totals.view(num_rows, num_nodes)[:, behind]).float()
    return SampledNodes(token_ids, probs.where(is_token & is_sampled.view(num_rows, num_nodes)[:, behind], 0))


def _filtered(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights float32 [num_rows, vocab_size], zero where a token is filtered out; of greedy rows any."""
    vocab_size = logits.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    heat = temperature.clamp(min=GREEDY_TEMPERATURE)[:, None]
    ordered = ((logits - logits.amax(dim=-1, keepdim=True)) / heat).exp().gather(-1, order)
    ranks = torch.arange(vocab_size, device=logits.device)
    limits = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)[:, None]
    ordered = ordered.where(ranks < limits, 0)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    target = top_p[:, None].double() * ordered.sum(dim=-1, keepdim=True, dtype=torch.float64)
    is_kept = (before < target) | (top_p[:, None] >= 1) | (ranks == 0)
    return torch.zeros_like(ordered).scatter(-1, order, ordered.where(is_kept, 0))


def _draw(weights: Tensor, draws: Tensor) -> Tensor:
    """int64 [num_rows]: where the cumulative weights pass a draw of their sum; never one of weight zero, but of NaN any."""
    ids = torch.arange(weights.shape[1], device=weights.device)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    is_past = (weights > 0) & (cumulative > draws[:, None] * cumulative[:, -1:])
    first = ids.where(is_past, weights.shape[1]).amin(dim=-1)
    return first.minimum(ids.where(weights > 0, 0).amax(dim=-1))
