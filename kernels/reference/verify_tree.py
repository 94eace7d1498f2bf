"""What becomes of trees of drafts, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.sample_nodes import SampledNodes


class TreeRound(NamedTuple):
    """What `verify_tree` finds. The drafts of a path are the accepted ones and, where it ends before a leaf that is there, the
    first child of its last node, which was refused like its siblings; -1 behind those."""

    packed: Tensor  # uint8 [num_rows * (28 * depth + 24)]: `ids`, then float32 [3, num_rows, depth]
    ids: Tensor  # int64 [num_rows, 2 * depth + 3], a view
    accepted_nodes: Tensor  # int64 [num_rows, depth], then -1
    last_nodes: Tensor  # int64 [num_rows], the last of them; 0, the root, where there is none
    next_token_ids: Tensor  # int64 [num_rows, num_nodes], the target's behind each node


def verify_tree(
    logits: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    parents: Tensor,
    depth: int,
    sampled: SampledNodes | None = None,
) -> TreeRound:
    """Follow each row's tree from the root on as long as a child is the target's own token, and add the one behind.

    The target's token behind a node is the lowest id that has its largest logit, which has to be finite; or of a sampled row
    what `sample_nodes` has drawn. A drafted token is accepted where its parent is, it is that token, and no sibling before it
    holds the same. The last token is the target's behind the last accepted node.

    Args:
        logits: float32 [num_rows * num_nodes, vocab_size], behind each node, the root first
        draft_token_ids: int64 [num_rows, num_nodes - 1], of the nodes from 1 on, below vocab_size
        num_draft_tokens: int64 [num_rows], 0 to num_nodes - 1; nodes behind those are padding, whatever they hold
        parents: int64 [num_nodes], of each node an earlier one and none before its predecessor's; -1 of the root
        depth: of the deepest node, at least 1
        sampled: of `sample_nodes` over these trees; None: all rows are greedy
    Returns:
        `TreeRound`. In each row of `ids` depth + 1 columns with the accepted tokens, the last one and -1 behind it; how many
        were accepted; 1, or 0 where a node of the path has no finite maximum, and then the last token is some id of the
        vocabulary; and the drafts of the path. Behind them, of each of those drafts its probability, of a greedy row at
        temperature 1, with which it is accepted, of a greedy row 1 or 0, and 1; of a child that was not tried, for its parent
        has no finite maximum, and of padding 0. Nothing is mutated.
    """
    num_rows, num_nodes = len(num_draft_tokens), len(parents)
    largest, best = logits.max(dim=-1)  # NaN counts as the largest, so the maximum tells all
    best, is_finite = best.view(num_rows, num_nodes), largest.isfinite().view(num_rows, num_nodes)
    if sampled is not None:
        best = sampled.token_ids.where(sampled.token_ids >= 0, best)
    nodes = torch.arange(num_nodes, device=logits.device)
    is_there = (nodes > 0) & (nodes <= num_draft_tokens[:, None])
    tokens = torch.nn.functional.pad(draft_token_ids, (1, 0)).where(is_there, 0)
    begins = torch.arange(num_rows, device=logits.device) * num_nodes

    node = torch.zeros_like(num_draft_tokens)
    is_open = is_usable = torch.ones_like(node, dtype=torch.bool)
    columns: list[tuple[Tensor, ...]] = []
    for _ in range(depth):
        choice, usable = (it.gather(1, node[:, None]) for it in (best, is_finite))
        is_child = is_there & (parents == node[:, None]) & is_open[:, None]
        is_match = is_child & (tokens == choice) & usable
        following, first = (nodes.where(it, num_nodes).amin(dim=1) for it in (is_match, is_child))
        is_taken, is_told = following < num_nodes, first < num_nodes
        told = torch.where(is_taken, following, first) * is_told
        token = tokens.gather(1, told[:, None])[:, 0]
        scores = logits.index_select(0, begins + node)
        prob = (scores.gather(1, token[:, None])[:, 0] - scores.logsumexp(dim=-1)).exp()
        accept_prob = is_taken.float()
        if sampled is not None:
            is_sampled = sampled.token_ids.gather(1, node[:, None])[:, 0] >= 0
            drawn_prob = sampled.probs.gather(1, (told - 1).clamp(min=0)[:, None])[:, 0]
            prob, accept_prob = (drawn_prob.where(is_sampled, it) for it in (prob, accept_prob))
        is_usable = is_usable & (usable[:, 0] | ~is_open)
        is_tried = is_told & usable[:, 0]
        columns.append(
            (
                choice[:, 0].where(is_open, -1),
                following.where(is_taken, -1),
                token.where(is_told, -1),
                prob.where(is_tried, 0),
                accept_prob.where(is_tried, 0),
                is_tried.float(),
            )
        )
        node, is_open = following.where(is_taken, node), is_taken
    token_ids, accepted_nodes, drafts, *probs = (torch.stack(it, dim=1) for it in zip(*columns, strict=True))
    last, usable = (it.gather(1, node[:, None]) for it in (best, is_finite))
    is_usable = is_usable & (usable[:, 0] | ~is_open)
    ends = (last.where(is_open[:, None], -1), (accepted_nodes > 0).sum(dim=1, keepdim=True), is_usable[:, None])
    ids = torch.cat((token_ids, *ends, drafts), dim=1)
    packed = torch.cat((ids.view(-1).view(torch.uint8), torch.stack(probs).view(-1).view(torch.uint8)))
    return TreeRound(packed, packed[: ids.nbytes].view(torch.int64).view(ids.shape), accepted_nodes, node, best)
