"""`EagleProposer`: an `EagleHead` drafts token by token, on features of the target and then on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.sample.metadata import copy_to
from backend.spec_decode.draft_vocabulary import DraftsInProgress, DraftVocabulary
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.proposer import DraftChain, DraftOutput, DraftRequest, TargetStep
from backend.spec_decode.spans import Spans
from backend.spec_decode.step_reader import StepReader
from backend.worker.decoders import StepDecoder
from backend.worker.step_tensors import HostBuffers, to_device


@dataclass(frozen=True, slots=True)
class EagleDraft:
    """A head with all that it drafts with."""

    head: EagleHead
    vocabulary: DraftVocabulary
    embedding: Tensor  # [vocab_size, hidden], the target's
    decoder: StepDecoder  # of the target, which runs the head's layer as one of its own
    layer_cache: LayerCache  # of the head's one layer, in the blocks of the target's first KV group
    attention: AttentionBackend


class EagleProposer(StepReader):
    """Behind every step of the target the head runs over the step's tokens, so that of each token it has the entry of the
    target's own features, and of each request what comes behind the last: a draft begins with that.

    An entry has its slot at the place of the token whose features it has, though it holds the next one too. So of a prefix
    that is found in the cache, the last entry of a block holds the token that came next when it was computed, and drafts for
    another continuation may be a little worse for it. The entries of drafts are written over by those of the tokens that came
    in their places.

    Args:
        spans: where the requests' tokens have their slots.
        states: float [num_rows, hidden], for the batch's persistent rows.
        num_passes: most tokens of a draft.
    """

    def __init__(self, draft: EagleDraft, spans: Spans, states: Tensor, num_passes: int) -> None:
        super().__init__()
        self._draft = draft
        self._spans = spans
        self._device = states.device
        self._uploads = HostBuffers(self._device, num_passes)
        self._features = states

    def observe(self, step: TargetStep) -> None:
        self.read(step)
        self.observed()

    def read(self, step: TargetStep) -> None:
        hidden = self._run(step.next_token_ids, step.states, step.metadata)
        self._features.index_copy_(0, step.rows, hidden.index_select(0, step.last_indices))

    def prepare(self, requests: Sequence[DraftRequest]) -> list[int]:
        return [0 if it.request_id in self._unseen else it.max_tokens for it in requests]

    def draft(self, chain: DraftChain) -> Tensor:
        vocabulary, head = self._draft.vocabulary, self._draft.head
        features, drafted = self._features.index_select(0, chain.rows), []
        for index in range(chain.num_tokens):
            if index:
                features = self._run(drafted[-1], features, chain.passes[index - 1])
            drafted.append(vocabulary.likeliest(vocabulary.logits(head.final_norm(features))))
        return torch.stack(drafted, dim=1)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        counts = self.prepare(requests)
        drafts = DraftsInProgress(requests, counts, self._draft.vocabulary)
        rows = np.array([it.row for it in requests], dtype=np.int64)
        features = self._features[copy_to(rows, self._device)]
        drafted = torch.zeros(len(requests), dtype=torch.int64, device=self._device)
        for index in range(max(counts)):
            chosen = [place for place, count in enumerate(counts) if count > index]
            places = copy_to(np.array(chosen, dtype=np.int64), self._device)
            if index:
                # The entry of the draft before this one, which stands behind the features that it was drafted from.
                tokens = {requests[place].request_id: (0,) for place in chosen}
                step = self._spans.span(tokens, [requests[place].num_tokens + index - 1 for place in chosen])
                metadata = to_device(step, self._uploads, self._device).metadata
                features[places] = self._run(drafted[places], features[places], metadata)
            logits = self._draft.vocabulary.logits(self._draft.head.final_norm(features[places]))
            drafted[places] = drafts.choose(logits, places, index)
        return drafts.output()

    def _run(self, token_ids: Tensor, features: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run entries: tokens int64 [num_tokens] beside the features before them; the features that come next."""
        draft = self._draft
        joined = draft.head.join_tokens(token_ids, draft.embedding, features)
        return draft.decoder.run_layer(draft.head.layer, joined, draft.layer_cache, metadata, draft.attention)
