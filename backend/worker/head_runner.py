"""`HeadModelRunner`: a `SpeculativeModelRunner` whose drafts come from a head on the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from backend.core.output import PendingOutput, SchedulerOutput
from backend.errors import CapacityError
from backend.models.loader import LoadedModel
from backend.models.model_config import DecoderConfig
from backend.models.sources import ModelSource
from backend.sample.metadata import copy_to
from backend.spec_decode.draft_vocabulary import DraftVocabulary
from backend.spec_decode.eagle import EagleDraft, EagleProposer
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.heads.head_config import HeadKind, named_head
from backend.spec_decode.heads.head_file import LoadedHead, load_head
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.shipped import shipped_head
from backend.spec_decode.heads.target import output_rows, target_fingerprint
from backend.spec_decode.medusa import MedusaProposer
from backend.spec_decode.proposer import HeadProposer, TargetStep
from backend.worker.decoders import layer_ops
from backend.worker.feature_decoder import FeatureDecoder
from backend.worker.graph_pass import GraphPass, Keep
from backend.worker.input_batch import InputBatch, StepInput
from backend.worker.memory_profile import OBSERVE_GRAPHS_BYTES
from backend.worker.out_of_memory import is_out_of_memory
from backend.worker.speculation import Followers
from backend.worker.speculative_batch import SpeculativeInputBatch, Verification
from backend.worker.speculative_runner import SpeculativeModelRunner
from backend.worker.step_tensors import StepTensors

if TYPE_CHECKING:
    from backend.worker.decode_graphs import DecodeGraphs
    from backend.worker.graphs import GraphSet
    from backend.worker.mixed_graphs import MixedGraphs
    from backend.worker.observe_graphs import ObserveGraphs


class HeadModelRunner(SpeculativeModelRunner):
    """Every step ends with the head's reading of what the target left, so that the next one can begin with a draft."""

    def _let_go(self) -> None:
        super()._let_go()
        self._head: LoadedHead | None = None
        self._vocabulary: DraftVocabulary | None = None
        self._proposer: HeadProposer | None = None
        self._last_pass: GraphPass | None = None  # of the target's last step, if that was launched op by op
        self._unread: GraphPass | None = None  # of that, if it was repeated and no draft has needed it yet
        self._kept: Tensor | None = None  # what the graphs keep of a pass, [max_num_tokens, hidden]
        self._observe_graphs: ObserveGraphs | None = None

    def load_model(self, source: ModelSource, on_progress: Callable[[float, float], None] | None = None) -> LoadedModel:
        """Also the head.

        Raises also `ConfigError` where there is none for the target, or it is of another kind or for another target,
        `ModelError` where it is damaged, and `CapacityError` where it does not fit.
        """
        folder, fingerprint = self._head_folder(source), target_fingerprint(source)
        loaded = super().load_model(source, on_progress)
        try:
            ops = layer_ops(self._config.kernels)
            head = load_head(folder, loaded.config, fingerprint, dtype=self._dtype, device=self._device, ops=ops)
            rows = output_rows(loaded.model, head.draft_token_ids).to(self._dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"the head of {folder} does not fit the GPU beside {source.name}: free the card, or make the model's weights "
                "smaller with model.dtype or quantization.method"
            ) from error
        self._head = head
        choose = self._sampling_ops.greedy_tokens
        self._vocabulary = DraftVocabulary(head.draft_token_ids, rows, loaded.config.vocab_size, choose, ops.linear)
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
        return shipped_head(kind, source) if settings.model is None else named_head(kind, settings.model)

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
            self._proposer = self._propose_by_medusa(head.head, vocabulary, model.embedding, states)
            self._chain = self._proposer
            return self._proposer
        draft = EagleDraft(
            head=head.head,
            vocabulary=vocabulary,
            embedding=model.embedding,
            decoder=self._decoder,
            layer_cache=self._draft_caches[0],
            attention=self._attention,
        )
        self._proposer = self._propose_by_eagle(draft, batch, states)
        self._chain = self._proposer
        return self._proposer

    def _propose_by_medusa(
        self, heads: MedusaHeads, vocabulary: DraftVocabulary, embedding: Tensor, states: Tensor
    ) -> MedusaProposer:
        assert self._decoder is not None
        return MedusaProposer(heads, vocabulary, self._decoder.final_hidden, embedding, states)

    def _propose_by_eagle(self, draft: EagleDraft, batch: SpeculativeInputBatch, states: Tensor) -> EagleProposer:
        return EagleProposer(draft, batch, states, self._config.speculative.num_speculative_tokens)

    @property
    def _head_proposer(self) -> HeadProposer | None:
        return self._proposer

    @property
    def _keep(self) -> Keep | None:
        return self._keep_states

    def _keep_states(self, hidden: Tensor) -> Tensor:
        """See `Keep`: what the head reads of a pass."""
        states = self._states_of(hidden)
        assert self._kept is not None
        return self._kept[: len(states)].copy_(states)

    @property
    def _graph_bytes(self) -> int:
        if self._config.kernels.enforce_eager:
            return super()._graph_bytes
        kept = self._max_num_kept * self.loaded.config.hidden_size * self._dtype.itemsize
        return super()._graph_bytes + kept + OBSERVE_GRAPHS_BYTES

    @property
    def _max_num_kept(self) -> int:
        """Tokens of the largest step in a graph."""
        scheduler = self._config.scheduler
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        return max(self._num_logits, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    def _states_of(self, hidden: Tensor) -> Tensor:
        """See `TargetStep`: of the pass that has just given these hidden states."""
        if not isinstance(self._decoder, FeatureDecoder):
            return hidden
        assert self._decoder.features is not None
        return self._decoder.features

    def _more_graphs(self, decode: DecodeGraphs, mixed: MixedGraphs, logits: Tensor) -> Sequence[GraphSet]:
        from backend.worker.observe_graphs import ObserveGraphs  # needs triton, which a CPU does without

        assert self._proposer is not None
        assert self._config.scheduler.max_num_seqs is not None
        sizes = (self._max_num_kept, self.loaded.config.hidden_size)
        self._kept = torch.zeros(sizes, dtype=self._dtype, device=self._device)
        self._observe_graphs = ObserveGraphs(
            self._proposer,
            lambda: [*mixed.all_left, *decode.all_left],
            len(mixed) + len(decode),
            self._last_tokens,
            max_num_tokens=self._max_num_kept,
            max_num_reqs=self._config.scheduler.max_num_seqs,
        )
        return [self._observe_graphs, *super()._more_graphs(decode, mixed, logits)]

    def _hidden(self, tensors: StepTensors) -> Tensor:
        hidden = super()._hidden(tensors)
        self._last_pass = GraphPass(self._states_of(hidden), tensors.token_rows, tensors.metadata)
        return hidden

    def _repeat(self, batch: InputBatch, scheduled: SchedulerOutput) -> tuple[list[str], Tensor] | None:
        repeated = super()._repeat(batch, scheduled)
        if repeated is None:
            self._catch_up()
            return None
        assert self._proposer is not None
        # A token of each request again, behind which comes what was sampled: what the head was told still holds.
        self._unread = self._left
        if not self._proposer.needs_last_only:
            self._catch_up()
        self._proposer.observed()
        return repeated

    def _run(self, batch: InputBatch, scheduled: SchedulerOutput) -> PendingOutput:
        if scheduled.num_draft_tokens:
            self._catch_up()
        return super()._run(batch, scheduled)

    def _catch_up(self) -> None:
        """Let the head read the last of repeated steps, before a draft needs it or another step takes its place."""
        if self._unread is not None:
            assert self._observe_graphs is not None
            self._observe_graphs.replay(self._unread)
            self._unread = None

    def _carry_out(self, step: StepInput) -> tuple[list[str], Tensor]:
        carried_out = super()._carry_out(step)
        ends = step.query_start_loc[1:].astype(np.int64) - 1
        self._observe(step, ends, None)
        return carried_out

    def _verified(self, step: StepInput, verification: Verification, followers: Followers) -> None:
        counts = verification.num_draft_tokens
        ends = step.query_start_loc[1:].astype(np.int64) - 1
        others = ends[~np.isin(step.token_rows[ends], verification.rows)]
        begins = verification.logits_indices[np.cumsum(counts + 1) - counts - 1]
        assert self._speculation is not None
        with self._speculation.preparing():
            self._observe(step, np.concatenate((others, begins)), (verification, followers))

    def _observe(
        self, step: StepInput, last_indices: np.ndarray, drafted: tuple[Verification, Followers] | None
    ) -> None:
        """Let the head read the step that has been started.

        Args:
            last_indices: int64, of each request's last token that is no draft.
            drafted: what became of those of the last requests.
        """
        assert isinstance(self._batch, SpeculativeInputBatch)
        assert self._proposer is not None
        rows, following = step.token_rows[last_indices], self._batch.next_token_ids(step)
        if self._last_pass is not None:
            left, self._last_pass = self._last_pass, None
            lasts, next_token_ids = copy_to(last_indices, self._device), copy_to(following, self._device)
            if drafted is not None:
                _move_on(lasts, next_token_ids, *drafted)
            next_token_ids = next_token_ids.where(next_token_ids >= 0, self._last_tokens[left.rows]).clamp(min=0)
            rows_there = copy_to(rows, self._device)
            self._proposer.read(TargetStep(left.states, next_token_ids, left.metadata, rows_there, lasts))
        else:
            graphs, left = self._observe_graphs, self._left
            assert graphs is not None
            lasts, next_token_ids = graphs.start(left, rows, last_indices, following, self._uploads)
            if drafted is not None:
                _move_on(lasts, next_token_ids, *drafted)
            graphs.replay(left)
        self._proposer.observed()

    @property
    def _left(self) -> GraphPass:
        """By the graph that has just been replayed."""
        for graphs in (self._mixed_graphs, self._decode_graphs):
            if graphs is not None and graphs.left is not None:
                left, graphs.left = graphs.left, None
                return left
        raise RuntimeError("no step has been run that could be observed")


def _move_on(lasts: Tensor, next_token_ids: Tensor, verification: Verification, followers: Followers) -> None:
    """Tell what became of drafts, in place: of each request's last token, and of what comes behind each."""
    counts, token_ids = verification.num_draft_tokens, followers.token_ids
    lasts[len(lasts) - len(counts) :] += followers.last_places
    places = np.flatnonzero(np.arange(token_ids.shape[1]) <= counts[:, None])
    targets, sources = copy_to(np.stack((verification.logits_indices, places)), lasts.device)
    next_token_ids.index_copy_(0, targets, token_ids.reshape(-1)[sources].clamp(min=0))  # none behind a rejected one
