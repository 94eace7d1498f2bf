"""What a round of trees leaves: for the head, for the cache and for the record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.core.output import ModelRunnerOutput, PendingOutput
from backend.sample.metadata import copy_to
from backend.sample.rejection_sampler import NO_TOKEN, VerifiedRound
from backend.sample.sampler import SamplerOps
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sample.tree_rejection import NO_NODE, TreeRejectionSampler, VerifiedTree
from backend.spec_decode.draft_tree import DraftTree
from backend.worker.speculation import Draft, Followers, padded_logits
from backend.worker.speculative_batch import Verification


class TreeRounds:
    """Nothing here waits for the device.

    Args:
        tree: of every draft, of which a row has the first nodes.
        ops: as of `RejectionSampler`.
    """

    def __init__(self, tree: DraftTree, device: torch.device, ops: SamplerOps | None = None) -> None:
        self._tree = tree
        self._device = device
        self._sampler = TreeRejectionSampler(tree, device, ops)
        self._depths = torch.arange(tree.depth, device=device)
        self._first_child = torch.tensor([children.start for children in tree.children], device=device)  # 0: a leaf

    def verify(self, logits: Tensor, draft: Draft, verification: Verification) -> VerifiedTree:
        """As `Speculation.verify`."""
        counts, sampling = verification.num_draft_tokens, verification.sampling
        return self._sampler(
            padded_logits(logits, counts, self._tree.num_drafted),
            draft.output.token_ids,
            copy_to(counts, self._device),
            draft.output.probs,
            SpeculativeSampling.build(sampling, self._tree.depth, self._device) if sampling else None,
        )

    def as_chain(
        self, verified: VerifiedTree, draft_token_ids: Tensor, num_draft_tokens: Tensor
    ) -> tuple[VerifiedRound, Tensor]:
        """A round as `DraftRounds` tells it, and its drafts, int64 [num_rows, depth]; -1 behind those.

        Args:
            draft_token_ids: int64 [num_rows, num_drafted].
            num_draft_tokens: int64 [num_rows].
        """
        first_refused = self._first_child[verified.last_nodes]
        first_refused = first_refused.where((first_refused > 0) & (first_refused <= num_draft_tokens), NO_NODE)
        nodes = verified.accepted_nodes
        nodes = nodes.where(self._depths != verified.num_accepted[:, None], first_refused[:, None])
        is_there, places = nodes > 0, (nodes - 1).clamp(min=0)

        def along(values: Tensor) -> Tensor:
            return values.gather(1, places).where(is_there, 0)

        chain = VerifiedRound(
            token_ids=verified.token_ids,
            num_accepted=verified.num_accepted,
            target_probs=along(verified.target_probs),
            draft_probs=along(verified.draft_probs),
            accept_probs=along(verified.accept_probs),
            finite=verified.finite,
        )
        return chain, draft_token_ids.gather(1, places).where(is_there, NO_TOKEN)

    def followers(self, verified: VerifiedTree) -> Followers:
        """What comes behind the root and each accepted node; of the others none does."""
        num_rows = len(verified.last_nodes)
        # A column more, for what is behind no node.
        token_ids = verified.token_ids.new_full((num_rows, len(self._tree) + 1), NO_TOKEN)
        nodes = torch.nn.functional.pad(verified.accepted_nodes, (1, 0))
        nodes = nodes.where(nodes != NO_NODE, len(self._tree))
        token_ids.scatter_(1, nodes, verified.token_ids)
        return Followers(verified.last_nodes, token_ids[:, :-1])


@dataclass(slots=True)
class PathDownload:
    """The `PendingOutput` of a round of trees, of which `pending` knows how many nodes were drafted, and `as_chain`."""

    pending: PendingOutput

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        rounds = output.rounds
        assert rounds is not None
        rounds.num_nodes = rounds.num_draft_tokens
        rounds.num_draft_tokens = (rounds.draft_token_ids != NO_TOKEN).sum(axis=1).tolist()
        return output
