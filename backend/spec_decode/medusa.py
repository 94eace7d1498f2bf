"""`MedusaProposer`: all tokens of a draft at once, of the hidden state that gave the last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from backend.sample.metadata import copy_to
from backend.spec_decode.draft_vocabulary import DraftsInProgress, DraftVocabulary
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.proposer import DraftOutput, DraftRequest, TargetStep
from backend.spec_decode.step_reader import StepReader


class MedusaProposer(StepReader):
    """Each head's token is chosen without regard to those before it.

    Args:
        final_hidden: see `StepDecoder.final_hidden`.
        states: float [num_rows, hidden], for the batch's persistent rows.
    """

    def __init__(
        self, heads: MedusaHeads, vocabulary: DraftVocabulary, final_hidden: Callable[[Tensor], Tensor], states: Tensor
    ) -> None:
        super().__init__()
        self._heads = heads
        self._vocabulary = vocabulary
        self._final_hidden = final_hidden
        self._hidden = states

    def observe(self, step: TargetStep) -> None:
        hidden = self._final_hidden(step.hidden.index_select(0, step.last_indices))
        self._hidden.index_copy_(0, step.rows, hidden)
        self._unseen.clear()

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        most = self._heads.num_heads
        counts = [0 if it.request_id in self._unseen else min(it.max_tokens, most) for it in requests]
        drafts = DraftsInProgress(requests, counts, self._vocabulary)
        rows = np.array([it.row for it in requests], dtype=np.int64)
        k = max(counts)
        if k == 0:
            return drafts.output()
        ahead = self._heads(self._hidden[copy_to(rows, self._hidden.device)])[:, :k]
        logits = self._vocabulary.logits(ahead.flatten(0, 1)).view(len(requests), k, -1)
        for index in range(k):
            chosen = [place for place, count in enumerate(counts) if count > index]
            places = copy_to(np.array(chosen, dtype=np.int64), self._hidden.device)
            drafts.choose(logits[places, index], places, index)
        return drafts.output()
