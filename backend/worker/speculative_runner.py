"""`SpeculativeModelRunner`: a `ModelRunner` whose steps verify drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from backend.config import EngineConfig
from backend.core.output import PendingOutput, SchedulerOutput
from backend.sample.metadata import copy_to
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.spec_decode.draft_model import DraftModel, DraftModelProposer
from backend.spec_decode.ngram import NgramProposer
from backend.spec_decode.proposer import ChainProposer, HeadProposer, Proposer, TextProposer
from backend.spec_decode.synthetic import SyntheticProposer, SyntheticSampler
from backend.worker.decoders import make_decoder
from backend.worker.draft_model_runner import DraftModelRunner
from backend.worker.input_batch import InputBatch, StepInput
from backend.worker.memory_profile import ROUND_GRAPH_BYTES
from backend.worker.round_download import RoundDownload, num_round_bytes, pack_round
from backend.worker.round_ops import REFERENCE_ROUND_OPS, RoundOps, triton_round_ops, verify_with
from backend.worker.round_texts import RoundTexts, has_texts, text_bytes
from backend.worker.speculation import Draft, Followers, Speculation
from backend.worker.speculative_batch import SpeculativeInputBatch, Verification
from backend.worker.step_tensors import HostBuffers, to_device
from backend.worker.token_download import TokenDownload

if TYPE_CHECKING:
    from backend.worker.decode_graphs import DecodeGraphs
    from backend.worker.graph_rounds import GraphRounds
    from backend.worker.graphs import GraphSet
    from backend.worker.mixed_graphs import MixedGraphs
    from backend.worker.round_graphs import RoundParts


class SpeculativeModelRunner(DraftModelRunner):
    """Drafts are made at the beginning of the step that verifies them. Steps without any are those of `ModelRunner`."""

    _batch_class = SpeculativeInputBatch
    _has_graph_rounds = True  # unless a subclass verifies in a way of its own

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        on_triton = config.kernels.backend == "triton"
        ops, acceptance = self._sampling_ops if on_triton else None, config.speculative.synthetic_acceptance
        self._rejection_sampler = RejectionSampler(ops) if acceptance is None else SyntheticSampler(acceptance, ops)

    def _let_go(self) -> None:
        super()._let_go()
        self._speculation: Speculation | None = None
        self._chain: ChainProposer | None = None  # the proposer, where graphs can hold its drafts
        self._texts: TextProposer | None = None  # the same, where it looks them up
        self._rounds: GraphRounds | None = None  # None: there are no graphs

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        super().initialize_kv_cache(num_blocks, max_model_len)
        self._speculation = Speculation(self._make_proposer(), self._rejection_sampler, self._device)

    def _make_proposer(self) -> Proposer:
        settings, model = self._config.speculative, self._draft_model
        if settings.synthetic_acceptance is not None:
            return SyntheticProposer(settings.synthetic_acceptance, self.loaded.config.vocab_size)
        if model is None:
            self._texts = NgramProposer(settings.ngram_min, settings.ngram_max)
            return self._texts
        batch, budget = self._batch, self._config.scheduler.max_num_batched_tokens
        assert isinstance(batch, SpeculativeInputBatch)
        assert budget is not None
        decoder, attention = make_decoder(model, self._config.kernels)
        draft = DraftModel(
            decoder=decoder,
            attention=attention,
            layer_caches=self._draft_caches or self._layer_caches[: model.config.num_layers],
            vocab_size=model.config.vocab_size,
            max_position_embeddings=model.config.max_position_embeddings,
            last_tokens=self._last_tokens,
            shares_cache=not self._draft_caches,
        )
        sizes = (self.loaded.config.vocab_size, budget, settings.num_speculative_tokens)
        proposer = DraftModelProposer(draft, batch, *sizes, self._device, self._sampling_ops.greedy_tokens)
        self._chain = proposer
        return proposer

    @property
    def _max_num_drafts(self) -> int:
        """Of a request in one step."""
        most = self._config.speculative.num_speculative_tokens
        return most if self.longest_draft is None else min(most, self.longest_draft)

    @property
    def _graph_bytes(self) -> int:
        if not self._has_graph_rounds or self._config.kernels.enforce_eager:
            return super()._graph_bytes
        from backend.worker.round_graphs import num_round_graphs  # needs triton, which a CPU does without

        # Beside the logits, which all graphs share, those of the largest verification several times over.
        logits = 4 * self._num_logits * self.loaded.config.vocab_size
        nodes = ROUND_GRAPH_BYTES * num_round_graphs(self._max_num_drafts)
        return super()._graph_bytes + nodes + 4 * logits + text_bytes(self._config)

    @property
    def _num_logits(self) -> int:
        from backend.worker.round_graphs import round_rows  # needs triton, which a CPU does without

        if not self._has_graph_rounds:
            return super()._num_logits
        assert self._config.scheduler.max_num_seqs is not None
        return round_rows(self._config.scheduler.max_num_seqs, self._max_num_drafts)

    def _more_graphs(self, decode: DecodeGraphs, mixed: MixedGraphs, logits: Tensor) -> Sequence[GraphSet]:
        from backend.worker.round_graphs import RoundParts

        if not self._has_graph_rounds:
            return super()._more_graphs(decode, mixed, logits)
        batch, max_num_reqs = self._batch, self._config.scheduler.max_num_seqs
        assert isinstance(batch, SpeculativeInputBatch)
        assert self._decoder is not None
        assert self._attention is not None
        assert max_num_reqs is not None
        parts = RoundParts(
            decoder=self._decoder,
            attention=self._attention,
            layer_caches=self._layer_caches,
            last_token_ids=self._last_tokens,
            logits=logits,
            ops=self._round_ops,
            chain=self._chain,
            head=self._head_proposer,
            keep=self._keep,
            texts=self._make_texts(batch.max_model_len),
        )
        self._rounds, graphs = self._make_rounds(
            parts,
            max_num_reqs=max_num_reqs,
            max_model_len=batch.max_model_len,
            block_size=self._config.cache.block_size,
            num_groups=len(self.layer_groups),
        )
        return [graphs]

    def _make_rounds(self, parts: RoundParts, **sizes: int) -> tuple[GraphRounds, GraphSet]:
        """Rounds in graphs, and these.

        Args:
            sizes: of `RoundGraphs`.
        """
        from backend.worker.graph_rounds import GraphRounds
        from backend.worker.round_graphs import RoundGraphs

        graphs = RoundGraphs(parts, num_speculative_tokens=self._max_num_drafts, **sizes)
        return GraphRounds(graphs, *self._round_parts(parts)), graphs

    def _round_parts(
        self, parts: RoundParts
    ) -> tuple[RoundParts, Speculation, SpeculativeInputBatch, HostBuffers, HostBuffers, str]:
        """What `GraphRounds` takes beside its graphs."""
        batch = self._batch
        assert isinstance(batch, SpeculativeInputBatch)
        assert self._speculation is not None
        return parts, self._speculation, batch, self._uploads, self._downloads, self._not_finite

    def _make_texts(self, max_model_len: int) -> RoundTexts | None:
        settings = self._config.speculative
        if self._texts is None or not has_texts(self._config):
            return None
        lengths, shape = (settings.ngram_min, settings.ngram_max), (self._last_tokens.numel(), max_model_len)
        return RoundTexts(self._texts, self._round_ops.ngram_drafts, lengths, shape, self._device)

    @property
    def _round_ops(self) -> RoundOps:
        ops = triton_round_ops() if self._config.kernels.backend == "triton" else REFERENCE_ROUND_OPS
        if isinstance(self._rejection_sampler, SyntheticSampler):
            return replace(ops, verify_chain=verify_with(self._rejection_sampler))
        return ops

    @property
    def _head_proposer(self) -> HeadProposer | None:
        """The proposer, if it reads the target's steps."""
        return None

    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        assert self._speculation is not None
        self._speculation.update(scheduled)
        return super().submit(scheduled)

    def _run(self, batch: InputBatch, scheduled: SchedulerOutput) -> PendingOutput:
        assert isinstance(batch, SpeculativeInputBatch)
        speculation = self._speculation
        assert speculation is not None
        batch.update(scheduled)
        if not scheduled.num_draft_tokens and set(scheduled.kinds.values()) == {"decode"}:
            if self._rounds is not None:
                self._rounds.forget()
            return speculation.watch(self._run_plain(batch, scheduled))
        if scheduled.continues:
            assert self._rounds is not None
            return speculation.watch(self._rounds.repeat(scheduled, partial(self._run_plain, batch)))
        if self._rounds is not None and self._rounds.takes(scheduled):
            pending = self._rounds.run(scheduled, partial(self._run_plain, batch))
            if pending is not None:
                return speculation.watch(pending)
        if self._rounds is not None:
            self._rounds.forget()
        speculation.follow(scheduled)
        draft = speculation.draft(batch.requests(scheduled)) if scheduled.num_draft_tokens else None
        if draft is not None:
            return speculation.watch(self._verify(batch, scheduled, draft))
        return speculation.watch(self._run_plain(batch, scheduled))

    def _verify(self, batch: SpeculativeInputBatch, scheduled: SchedulerOutput, draft: Draft) -> PendingOutput:
        """Run a step with drafts behind the last tokens of some of its requests; the others go on as ever."""
        speculation = self._speculation
        assert speculation is not None
        if self._decode_graphs is not None:
            self._decode_graphs.forget()
        step, verification = batch.build_drafted(scheduled, draft.num_tokens)
        logits = self._run_drafted(step, draft, verification)
        num_others = len(step.sampled_request_ids)
        outcomes = rows = self._upload(step.sampled_rows)
        if num_others:
            outcomes = self._sample(logits[:num_others], step.sampling, rows)
        others = TokenDownload(step.sampled_request_ids, outcomes, self._downloads, self._not_finite)
        return self._end_round(step, draft, verification, logits[num_others:], others)

    def _end_round(
        self, step: StepInput, draft: Draft, verification: Verification, logits: Tensor, others: PendingOutput
    ) -> PendingOutput:
        """What becomes of the drafts.

        Args:
            logits: float32 [num_logits, vocab_size], of `verification.logits_indices`.
            others: of the step's other requests.
        """
        assert self._speculation is not None
        verified = self._speculation.verify(logits, draft, verification)
        download = self._download(draft, verification, verified, draft.output.token_ids, others)
        self._verified(step, verification, Followers(verified.num_accepted, verified.token_ids))
        return download

    def _download(
        self,
        draft: Draft,
        verification: Verification,
        verified: VerifiedRound,
        draft_token_ids: Tensor,
        others: PendingOutput,
    ) -> RoundDownload:
        """Record each request's last token, and tell the host of the round.

        Args:
            draft_token_ids: int64 [num_rows, k], those that `verified` speaks of.
        """
        last = verified.token_ids.gather(1, verified.num_accepted[:, None])[:, 0]
        self._record_tokens(last, verified.finite, self._upload(verification.rows), self._last_tokens)
        shape = (len(verification.rows), draft_token_ids.shape[1])
        return RoundDownload(
            list(draft.num_tokens),
            list(draft.num_tokens.values()),
            pack_round(verified, draft_token_ids),
            shape,
            self._downloads.next(num_round_bytes(*shape)),
            draft.times,
            self._not_finite,
            others,
        )

    def _verified(self, step: StepInput, verification: Verification, followers: Followers) -> None:
        """A step with drafts has been started, and its tokens are recorded."""

    def _run_drafted(self, step: StepInput, draft: Draft, verification: Verification) -> Tensor:
        """float32 [num_rows, vocab_size] of the step's `logits_indices` and, behind them, those of the verification."""
        return self._logits_behind(step, verification.logits_indices, draft, verification)

    def _logits_behind(
        self,
        step: StepInput,
        indices: np.ndarray,
        draft: Draft,
        verification: Verification,
        trees: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Tensor:
        """float32 [num_rows, vocab_size] of the step's `logits_indices` and, behind them, of further tokens of it.

        Args:
            indices: int64, of those.
            trees: see `MixedGraphs.replay`.
        """
        speculation = self._speculation
        assert speculation is not None
        padding_rows = np.full(len(indices), self._last_tokens.numel() - 1, dtype=np.int64)
        step = replace(
            step,
            logits_indices=np.concatenate((step.logits_indices, indices)),
            sampled_rows=np.concatenate((step.sampled_rows, padding_rows)),
        )
        fill = partial(speculation.put_drafts, draft=draft, verification=verification)
        if self._mixed_graphs is not None and self._mixed_graphs.fits(step):
            return self._mixed_graphs.replay(step, self._uploads, fill, trees).logits
        tensors = to_device(step, self._uploads, self._device)
        fill(tensors.token_ids)
        if trees is not None:
            mask, starts = (copy_to(array, self._device) for array in trees)
            tensors = replace(tensors, metadata=tensors.metadata.with_trees(mask, starts))
        return self._logits(self._hidden(tensors)[tensors.logits_indices])
