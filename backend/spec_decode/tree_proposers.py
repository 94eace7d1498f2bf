"""Heads that draft trees: `EagleTreeProposer` and `MedusaTreeProposer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from backend.sample.metadata import copy_to
from backend.spec_decode.draft_vocabulary import DraftVocabulary
from backend.spec_decode.eagle import EagleDraft, EagleProposer
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.medusa import MedusaProposer
from backend.spec_decode.proposer import DraftOutput, DraftRequest, HeadProposer
from backend.spec_decode.spans import Spans
from backend.spec_decode.tree_drafting import TopTokens, TreeLayout, eagle_nodes, medusa_nodes


class TreeProposer(HeadProposer, Protocol):
    """A head whose trees come from the device alone: they can be recorded in a CUDA graph."""

    def draft_nodes(self, rows: Tensor, num_tokens: Tensor, block_table: Tensor) -> Tensor:
        """The likeliest tokens along the tree, int64 [num_rows, num_drafted], of nodes 1 and on. Reads nothing of the host's.

        Args:
            rows: int64 [num_rows], of the batch's persistent arrays.
            num_tokens: int64 [num_rows], that each request has, the last of which the target has not run; 0 of a padding row.
            block_table: int32 [num_rows, max_num_blocks], of the first KV group; the null block where there is none.
        """
        ...


class EagleTreeProposer(EagleProposer):
    """All nodes are drafted for everybody: `DraftOutput.token_ids` are those of nodes 1 and on, point masses, of which a request
    has as many as it may.

    The entries of inner nodes lie one behind the other behind those of the text, never beyond the slots of the nodes themselves.
    What a step then leaves of the accepted ones is written in their place.

    Args:
        block_size, max_position: see `TreeLayout.passes`.
        top: chooses the tokens of a node's children.
    """

    def __init__(
        self,
        draft: EagleDraft,
        spans: Spans,
        states: Tensor,
        layout: TreeLayout,
        block_size: int,
        max_position: int,
        top: TopTokens,
    ) -> None:
        super().__init__(draft, spans, states, layout.tree.depth)
        self._layout = layout
        self._block_size = block_size
        self._max_position = max_position
        self._top = top

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        lengths = np.array([it.num_tokens for it in requests], dtype=np.int64)
        num_slots = int(lengths.max()) + self._layout.tree.num_drafted
        tables = self._spans.block_tables([it.request_id for it in requests], num_slots)
        there = copy_to(lengths, self._device), copy_to(tables, self._device)
        return DraftOutput(self.draft_nodes(_rows_of(requests, self._device), *there), self.prepare(requests))

    def draft_nodes(self, rows: Tensor, num_tokens: Tensor, block_table: Tensor) -> Tensor:
        draft = self._draft
        return eagle_nodes(
            self._layout,
            self._features.index_select(0, rows),
            self._layout.passes(block_table, num_tokens, self._block_size, self._max_position),
            self._run,
            lambda features: draft.vocabulary.logits(draft.head.final_norm(features)),
            draft.vocabulary.token_ids,
            self._top,
        )


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
        top: TopTokens,
    ) -> None:
        super().__init__(heads, vocabulary, final_hidden, embedding, states)
        self._layout = layout
        self._top = top

    def prepare(self, requests: Sequence[DraftRequest]) -> list[int]:
        return [0 if it.request_id in self._unseen else it.max_tokens for it in requests]

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        rows = _rows_of(requests, self._fused.device)
        return DraftOutput(self._nodes(rows), self.prepare(requests))

    def draft_nodes(self, rows: Tensor, num_tokens: Tensor, block_table: Tensor) -> Tensor:
        return self._nodes(rows)

    def _nodes(self, rows: Tensor) -> Tensor:
        layout = self._layout
        ahead = self._heads(self._fused.index_select(0, rows))[:, : layout.tree.depth]
        logits = self._vocabulary.logits(ahead.flatten(0, 1)).view(len(rows), layout.tree.depth, -1)
        return medusa_nodes(layout, logits, self._vocabulary.token_ids, self._top)


def _rows_of(requests: Sequence[DraftRequest], device: torch.device) -> Tensor:
    return copy_to(np.array([it.row for it in requests], dtype=np.int64), device)
