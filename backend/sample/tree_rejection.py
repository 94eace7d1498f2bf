"""`TreeRejectionSampler`: a target's logits and a tree of drafts to the tokens that the target would have given.

From the root on, the children of a node are tried in order of rank. The first is accepted as a token of a chain is, see
`rejection_sampler`: with probability min(1, target(x) / draft(x)). If it is refused, the residual max(0, target - draft),
normalized, takes the target's place for the next child, and the draft without the refused token, normalized, the draft's, since
siblings are drawn without replacement. After the last child the residual itself gives the token; below an accepted child all
begins anew. That is the recursive rejection of SpecInfer (Miao et al., ASPLOS 2024), for draws without replacement as in EAGLE
(Li et al., ICML 2024) and RSD-S (Jeon et al., "Recursive speculative decoding", 2024).

Children that are no draws, such as a head's likeliest tokens, are point masses: each is accepted with what is left of its
probability, and what is left after a refusal is the rest without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.sample.node_law import NodeLaw, of_node
from backend.sample.rejection_sampler import round_tokens
from backend.sample.sampler import SamplerOps
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.spec_decode.draft_tree import DraftTree
from kernels.reference.greedy_tokens import greedy_tokens

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """On the logits' device, perhaps not computed yet: reading a tensor waits for it. Probabilities are those of nodes 1 and on.

    Attributes:
        token_ids: int64 [num_rows, depth + 1], the accepted tokens, then the recovered or bonus token, then -1.
        num_accepted: int64 [num_rows], of the drafted tokens.
        accepted_nodes: int64 [num_rows, depth], of the accepted tokens, then -1.
        last_nodes: int64 [num_rows], of the last accepted token; 0, the root, where there is none.
        target_probs: float32 [num_rows, num_drafted], of the tokens that were tried; of a greedy row at temperature 1, where its
            logit stands. Of all others 0, here and below.
        draft_probs: float32 [num_rows, num_drafted], what it was drawn with where its siblings before it were; 1 of a point mass.
        accept_probs: float32 [num_rows, num_drafted], that it is accepted once it is tried; of a greedy row 1 or 0.
        finite: bool [num_rows]; False: the row had no usable logits where they were needed, and its tokens mean nothing.
    """

    token_ids: Tensor
    num_accepted: Tensor
    accepted_nodes: Tensor
    last_nodes: Tensor
    target_probs: Tensor
    draft_probs: Tensor
    accept_probs: Tensor
    finite: Tensor


class TreeRejectionSampler:
    """Nothing here waits for the device or asks for a value: it may be recorded in a CUDA graph.

    Draws are those of a chain: one of ACCEPT for each position, of which what a refusal leaves serves the next sibling; one of
    RECOVERED where all children are refused, and the plain draw of TOKEN where there are none. So a tree that is a chain gives
    what `RejectionSampler` does, and a row that has drafted nothing the token of `Sampler`.

    Args:
        ops: as of `RejectionSampler`.
    """

    def __init__(self, tree: DraftTree, device: torch.device, ops: SamplerOps | None = None) -> None:
        self._ops = ops
        # Most children of a node at each depth, the last one's 0.
        self._widths = [max(len(tree.children[node]) for node in level) for level in tree.levels]
        self._num_nodes, self._depth = len(tree), tree.depth
        self._first_child = torch.tensor([children.start for children in tree.children], device=device)
        self._num_children = torch.tensor([len(children) for children in tree.children], device=device)
        self._depths = torch.tensor(tree.depths, device=device)
        inner = [node for node in range(len(tree)) if tree.children[node]]
        places = {node: place for place, node in enumerate(inner)}
        self._num_inner = len(inner)
        self._inner_place = torch.tensor([places.get(node, 0) for node in range(len(tree))], device=device)

    @property
    def num_inner(self) -> int:
        """Nodes with children: of each there is a draft distribution, in order of their numbers."""
        return self._num_inner

    def __call__(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        sampling: SpeculativeSampling | None,
    ) -> VerifiedTree:
        """Verify a tree for each row. Nothing is mutated.

        Args:
            target_logits: float [num_rows, num_nodes, vocab_size], behind each node, the root first.
            draft_token_ids: int64 [num_rows, num_nodes - 1], of the nodes from 1 on.
            num_draft_tokens: int64 [num_rows], of them, 0 to all: nodes behind those are not there. As with chains, how many
                may not depend on a token that is left out; whole levels do.
            draft_probs: float32 [num_rows, num_inner, vocab_size], of each inner node what its first child was drawn from, and
                each further one where the siblings before it were left out; None: all are point masses.
            sampling: of the round's positions, `depth` drafted ones; None: every row is greedy.
        Raises:
            ValueError: a shape is not as above.
        """
        self._check(target_logits, draft_token_ids, num_draft_tokens, draft_probs, sampling)
        num_rows, _, vocab_size = target_logits.shape
        logits = self._ban(target_logits.float(), sampling)
        best, is_finite = (self._ops.greedy_tokens if self._ops else greedy_tokens)(logits.reshape(-1, vocab_size))
        best, is_finite = best.view(num_rows, -1), is_finite.view(num_rows, -1)
        # One column more, node 0's: no draft.
        tokens = torch.nn.functional.pad(draft_token_ids, (1, 0))
        tokens = tokens.where(torch.arange(self._num_nodes, device=logits.device) <= num_draft_tokens[:, None], 0)
        samples = sampling is not None and sampling.samples
        law = NodeLaw(logits, best, draft_probs, self._inner_place, sampling if samples else None)

        node = num_draft_tokens.new_zeros(num_rows)
        is_open = torch.ones_like(node, dtype=torch.bool)
        path = []
        target_probs, reported_draft, accept_probs = (logits.new_zeros(num_rows, self._num_nodes) for _ in range(3))
        for depth, width in enumerate(self._widths):
            law.begin(node, depth)
            usable = is_open & of_node(is_finite, node)
            following, is_taken = node, torch.zeros_like(is_open)
            for rank in range(width):
                child = self._first_child[node] + rank
                is_tried = usable & ~is_taken & (rank < self._num_children[node]) & (child <= num_draft_tokens)
                child = child.where(is_tried, 0)
                tried = law.try_child(of_node(tokens, child), is_tried)
                for kept, probs in zip((target_probs, reported_draft, accept_probs), tried[1:], strict=True):
                    kept.scatter_(1, child[:, None], probs[:, None])
                following = child.where(tried.is_accepted, following)
                is_taken = is_taken | tried.is_accepted
            law.end(is_open & ~is_taken)
            node, is_open = following, is_taken
            path.append(node.where(is_taken, NO_NODE))
        accepted_nodes = torch.stack(path[:-1], dim=1)
        num_accepted = (accepted_nodes != NO_NODE).sum(dim=1)
        last = law.last_token(node, num_accepted, self._ops)
        columns = torch.arange(self._depth + 1, device=logits.device)
        visited = torch.cat((torch.zeros_like(node)[:, None], accepted_nodes.clamp(min=0)), dim=1)
        return VerifiedTree(
            token_ids=round_tokens(tokens.gather(1, accepted_nodes.clamp(min=0)), num_accepted, last, columns),
            num_accepted=num_accepted,
            accepted_nodes=accepted_nodes,
            last_nodes=node,
            target_probs=target_probs[:, 1:],
            draft_probs=reported_draft[:, 1:],
            accept_probs=accept_probs[:, 1:],
            finite=is_finite.gather(1, visited).all(dim=1),
        )

    def _ban(self, logits: Tensor, sampling: SpeculativeSampling | None) -> Tensor:
        """The logits with those of banned ids at -inf; a node's position in the round is its depth."""
        if sampling is None or sampling.banned_token_ids is None or sampling.num_banned_positions is None:
            return logits
        ids = sampling.banned_token_ids[:, None, :].expand(-1, self._num_nodes, -1)
        is_banned = self._depths < sampling.num_banned_positions[:, None]
        return logits.scatter(-1, ids, logits.gather(-1, ids).masked_fill(is_banned[:, :, None], -torch.inf))

    def _check(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        sampling: SpeculativeSampling | None,
    ) -> None:
        num_rows, _, vocab_size = target_logits.shape
        expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
            ("target_logits", target_logits, (num_rows, self._num_nodes, vocab_size)),
            ("draft_token_ids", draft_token_ids, (num_rows, self._num_nodes - 1)),
            ("num_draft_tokens", num_draft_tokens, (num_rows,)),
            ("draft_probs", draft_probs, (num_rows, self._num_inner, vocab_size)),
            ("accept_draws", sampling and sampling.accept_draws, (num_rows, self._depth)),
            ("recovered_draws", sampling and sampling.recovered_draws, (num_rows, self._depth)),
            ("token_draws", sampling and sampling.token_draws, (num_rows, self._depth + 1)),
        ]
        for name, tensor, shape in expected:
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; {shape} belongs to {num_rows} rows and a tree of {self._num_nodes} "
                    f"nodes, {self._depth} deep"
                )
