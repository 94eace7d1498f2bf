"""`HeadModelRunner`: a `SpeculativeModelRunner` whose drafts come from a head on the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.errors import CapacityError, ConfigError
from backend.models.loader import LoadedModel
from backend.models.model_config import DecoderConfig
from backend.models.sources import ModelSource
from backend.sample.metadata import copy_to
from backend.sample.rejection_sampler import VerifiedRound
from backend.spec_decode.draft_vocabulary import DraftVocabulary
from backend.spec_decode.eagle import EagleDraft, EagleProposer
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.heads.head_config import HeadKind, read_head_config
from backend.spec_decode.heads.head_file import LoadedHead, load_head
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.shipped import shipped_head
from backend.spec_decode.heads.target import output_rows, target_fingerprint
from backend.spec_decode.medusa import MedusaProposer
from backend.spec_decode.proposer import HeadProposer, TargetStep
from backend.worker.feature_decoder import FeatureDecoder
from backend.worker.input_batch import StepInput
from backend.worker.out_of_memory import is_out_of_memory
from backend.worker.speculative_batch import SpeculativeInputBatch, Verification
from backend.worker.speculative_runner import SpeculativeModelRunner
from backend.worker.step_tensors import StepTensors


class HeadModelRunner(SpeculativeModelRunner):
    """Every step ends with the head's reading of what the target left, so that the next one can begin with a draft."""

    def __init__(self, config: EngineConfig) -> None:
        # A graph leaves logits only: see `resolve_speculation`.
        super().__init__(config.with_overrides({"kernels.enforce_eager": True}))

    def _let_go(self) -> None:
        super()._let_go()
        self._head: LoadedHead | None = None
        self._vocabulary: DraftVocabulary | None = None
        self._proposer: HeadProposer | None = None
        self._last_pass: tuple[StepTensors, Tensor] | None = None  # of the target's last step, and its hidden states

    def load_model(self, source: ModelSource, on_progress: Callable[[float, float], None] | None = None) -> LoadedModel:
        """Also the head.

        Raises also `ConfigError` where there is none for the target, or it is of another kind or for another target,
        `ModelError` where it is damaged, and `CapacityError` where it does not fit.
        """
        folder, fingerprint = self._head_folder(source), target_fingerprint(source)
        loaded = super().load_model(source, on_progress)
        try:
            head = load_head(folder, loaded.config, fingerprint, dtype=self._dtype, device=self._device)
            rows = output_rows(loaded.model, head.draft_token_ids).to(self._dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"the head of {folder} does not fit the GPU beside {source.name}: free the card, or make the model's weights "
                "smaller with model.dtype or quantization.method"
            ) from error
        self._head = head
        self._vocabulary = DraftVocabulary(head.draft_token_ids, rows, loaded.config.vocab_size)
        if isinstance(head.head, EagleHead):
            assert self._decoder is not None
            layers = head.config.feature_layers
            self._decoder = FeatureDecoder(self._decoder, head.head, layers, loaded.model.embedding)
        num_bytes = self._num_parameters * self._dtype.itemsize
        self._loaded = replace(loaded, weights_bytes=loaded.weights_bytes + num_bytes)
        return self._loaded

    def _head_folder(self, source: ModelSource) -> Path:
        """Before the target's weights are read: what is wrong with the head is said at once."""
        settings = self._config.speculative
        kind = cast(HeadKind, settings.method)
        if settings.model is None:
            return shipped_head(kind, source)
        folder = Path(settings.model).expanduser()
        found = read_head_config(folder).kind
        if found != kind:
            raise ConfigError(
                f"speculative.model = {settings.model!r} holds a head of kind {found}: it goes with "
                f"speculative.method = {found!r}, and not with {kind!r}"
            )
        return folder

    @property
    def _num_parameters(self) -> int:
        """Of the head, with the rows of the target's output head that it drafts over."""
        assert self._head is not None
        assert self._vocabulary is not None
        return self._head.num_parameters + self._vocabulary.num_parameters

    @property
    def longest_draft(self) -> int | None:
        head = self._head.head if self._head else None
        return head.num_heads if isinstance(head, MedusaHeads) else None

    @property
    def draft_cost(self) -> float:
        num_passes = self.longest_draft or 1  # Medusa heads draft in one
        return self._num_parameters / num_passes / self.loaded.config.count_parameters()

    @property
    def _own_draft(self) -> DecoderConfig | None:
        """An EAGLE head's one layer, as wide as the target's first KV group sees: those without a window come first."""
        assert self._head is not None
        if not isinstance(self._head.head, EagleHead):
            return None
        window = self.layer_groups[0].window
        return replace(
            self.loaded.config, num_layers=1, sliding_window=window, sliding_layers=(0,) if window is not None else ()
        )

    def _make_proposer(self) -> HeadProposer:
        batch, head, vocabulary, model = self._batch, self._head, self._vocabulary, self.loaded.model
        assert isinstance(batch, SpeculativeInputBatch)
        assert head is not None
        assert vocabulary is not None
        assert self._decoder is not None
        assert self._attention is not None
        num_rows, hidden_size = self._last_tokens.numel(), model.config.hidden_size
        states = torch.zeros(num_rows, hidden_size, dtype=self._dtype, device=self._device)
        if isinstance(head.head, MedusaHeads):
            self._proposer = MedusaProposer(head.head, vocabulary, self._decoder.final_hidden, states)
            return self._proposer
        draft = EagleDraft(
            head=head.head,
            vocabulary=vocabulary,
            embedding=model.embedding,
            cos_sin_cache=model.cos_sin_cache,
            layer_cache=self._draft_caches[0],
            attention=self._attention,
        )
        self._proposer = EagleProposer(draft, batch, states, self._config.speculative.num_speculative_tokens)
        return self._proposer

    def _hidden(self, tensors: StepTensors) -> Tensor:
        hidden = super()._hidden(tensors)
        self._last_pass = tensors, hidden
        return hidden

    def _forward(self, step: StepInput) -> Tensor:
        outcomes = super()._forward(step)
        ends = step.query_start_loc[1:].astype(np.int64) - 1
        last_indices, rows = copy_to(np.stack((ends, step.token_rows[ends])), self._device)
        self._observe(last_indices, rows, self._next_token_ids(step))
        return outcomes

    def _verified(self, step: StepInput, verification: Verification, verified: VerifiedRound) -> None:
        counts = verification.num_draft_tokens
        ends = step.query_start_loc[1:].astype(np.int64) - 1
        others = ends[~np.isin(step.token_rows[ends], verification.rows)]
        begins = verification.logits_indices[np.cumsum(counts + 1) - counts - 1]
        indices = np.concatenate((others, begins))
        last_indices, rows = copy_to(np.stack((indices, step.token_rows[indices])), self._device)
        last_indices[len(others) :] += verified.num_accepted
        following, token_ids = self._next_token_ids(step), verified.token_ids
        places = np.flatnonzero(np.arange(token_ids.shape[1]) <= counts[:, None])
        targets, sources = copy_to(np.stack((verification.logits_indices, places)), self._device)
        following.index_copy_(0, targets, token_ids.reshape(-1)[sources])
        assert self._speculation is not None
        with self._speculation.preparing():
            self._observe(last_indices, rows, following)

    def _next_token_ids(self, step: StepInput) -> Tensor:
        """int64 [num_tokens]: what comes behind each token of a step, its requests' new last ones included."""
        assert isinstance(self._batch, SpeculativeInputBatch)
        following, rows = copy_to(np.stack((self._batch.next_token_ids(step), step.token_rows)), self._device)
        return torch.where(following < 0, self._last_tokens[rows], following)

    def _observe(self, last_indices: Tensor, rows: Tensor, next_token_ids: Tensor) -> None:
        assert self._last_pass is not None
        assert self._proposer is not None
        (tensors, hidden), self._last_pass = self._last_pass, None
        features = self._decoder.features if isinstance(self._decoder, FeatureDecoder) else None
        next_token_ids = next_token_ids.clamp(min=0)  # there is none behind a rejected draft
        self._proposer.observe(TargetStep(hidden, features, next_token_ids, tensors.metadata, rows, last_indices))
