"""Heads that draft trees: `EagleTreeProposer` and `MedusaTreeProposer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from backend.sample.metadata import copy_to
from backend.spec_decode.draft_vocabulary import DraftVocabulary
from backend.spec_decode.eagle import EagleDraft, EagleProposer
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.medusa import MedusaProposer
from backend.spec_decode.proposer import DraftOutput, DraftRequest
from backend.spec_decode.spans import Spans
from backend.spec_decode.tree_drafting import TreeLayout, eagle_nodes, medusa_nodes


class EagleTreeProposer(EagleProposer):
    """All nodes are drafted for everybody: `DraftOutput.token_ids` are those of nodes 1 and on, point masses, of which a request
    has as many as it may.

    The entries of inner nodes lie one behind the other behind those of the text, never beyond the slots of the nodes themselves.
    What a step then leaves of the accepted ones is written in their place.

    Args:
        block_size, max_position: see `TreeLayout.passes`.
    """

    def __init__(
        self, draft: EagleDraft, spans: Spans, states: Tensor, layout: TreeLayout, block_size: int, max_position: int
    ) -> None:
        super().__init__(draft, spans, states, layout.tree.depth)
        self._layout = layout
        self._block_size = block_size
        self._max_position = max_position

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        counts = self.prepare(requests)
        draft, tree = self._draft, self._layout.tree
        lengths = np.array([it.num_tokens for it in requests], dtype=np.int64)
        tables = self._spans.block_tables([it.request_id for it in requests], int(lengths.max()) + tree.num_drafted)
        passes = self._layout.passes(
            copy_to(tables, self._device), copy_to(lengths, self._device), self._block_size, self._max_position
        )
        nodes = eagle_nodes(
            self._layout,
            self._features[_rows_of(requests, self._device)],
            passes,
            self._run,
            lambda features: draft.vocabulary.logits(draft.head.final_norm(features)),
            draft.vocabulary.token_ids,
        )
        return DraftOutput(nodes, counts)


class MedusaTreeProposer(MedusaProposer):
    """Drafts as `EagleTreeProposer` does, every level by its own head."""

    def __init__(
        self,
        heads: MedusaHeads,
        vocabulary: DraftVocabulary,
        final_hidden: Callable[[Tensor], Tensor],
        embedding: Tensor,
        states: Tensor,
        layout: TreeLayout,
    ) -> None:
        super().__init__(heads, vocabulary, final_hidden, embedding, states)
        self._layout = layout

    def prepare(self, requests: Sequence[DraftRequest]) -> list[int]:
        return [0 if it.request_id in self._unseen else it.max_tokens for it in requests]

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        counts, layout = self.prepare(requests), self._layout
        ahead = self._heads(self._fused[_rows_of(requests, self._fused.device)])[:, : layout.tree.depth]
        logits = self._vocabulary.logits(ahead.flatten(0, 1)).view(len(requests), layout.tree.depth, -1)
        return DraftOutput(medusa_nodes(layout, logits, self._vocabulary.token_ids), counts)


def _rows_of(requests: Sequence[DraftRequest], device: torch.device) -> Tensor:
    return copy_to(np.array([it.row for it in requests], dtype=np.int64), device)
