"""`MedusaProposer`: all tokens of a draft at once, of the last token and the hidden state that gave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from backend.sample.metadata import copy_to
from backend.spec_decode.draft_vocabulary import DraftsInProgress, DraftVocabulary
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.proposer import DraftChain, DraftOutput, DraftRequest, TargetStep
from backend.spec_decode.step_reader import StepReader


class MedusaProposer(StepReader):
    """Each head's token is chosen without regard to those before it.

    Args:
        final_hidden: see `StepDecoder.final_hidden`.
        embedding: the target's, float [vocab_size, hidden].
        states: float [num_rows, hidden], for the batch's persistent rows: what the heads read.
    """

    needs_last_only = True

    def __init__(
        self,
        heads: MedusaHeads,
        vocabulary: DraftVocabulary,
        final_hidden: Callable[[Tensor], Tensor],
        embedding: Tensor,
        states: Tensor,
    ) -> None:
        super().__init__()
        self._heads = heads
        self._vocabulary = vocabulary
        self._final_hidden = final_hidden
        self._embedding = embedding
        self._fused = states

    def observe(self, step: TargetStep) -> None:
        self.read(step)
        self.observed()

    def read(self, step: TargetStep) -> None:
        hidden = self._final_hidden(step.states.index_select(0, step.last_indices))
        embedded = F.embedding(step.next_token_ids.index_select(0, step.last_indices), self._embedding)
        self._fused.index_copy_(0, step.rows, self._heads.fuse(hidden, embedded))

    def prepare(self, requests: Sequence[DraftRequest]) -> list[int]:
        most = self._heads.num_heads
        return [0 if it.request_id in self._unseen else min(it.max_tokens, most) for it in requests]

    def draft(self, chain: DraftChain) -> Tensor:
        k = chain.num_tokens
        ahead = self._heads(self._fused.index_select(0, chain.rows))[:, :k]
        return self._vocabulary.likeliest(self._vocabulary.logits(ahead.flatten(0, 1))).view(-1, k)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        counts = self.prepare(requests)
        drafts = DraftsInProgress(requests, counts, self._vocabulary)
        rows = np.array([it.row for it in requests], dtype=np.int64)
        k = max(counts)
        if k == 0:
            return drafts.output()
        ahead = self._heads(self._fused[copy_to(rows, self._fused.device)])[:, :k]
        logits = self._vocabulary.logits(ahead.flatten(0, 1)).view(len(requests), k, -1)
        for index in range(k):
            chosen = [place for place, count in enumerate(counts) if count > index]
            places = copy_to(np.array(chosen, dtype=np.int64), self._fused.device)
            drafts.choose(logits[places, index], places, index)
        return drafts.output()
