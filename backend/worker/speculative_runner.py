"""`SpeculativeModelRunner`: a `ModelRunner` whose steps verify drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from backend.attention.metadata import LayerCache
from backend.config import EngineConfig
from backend.core.kv_format import KV_FORMATS
from backend.core.kv_groups import KVGroupSpec
from backend.core.output import PendingOutput, SchedulerOutput
from backend.errors import CapacityError, ConfigError
from backend.models.decoder import Decoder
from backend.models.loader import LoadedModel, load_model
from backend.models.model_config import DecoderConfig
from backend.models.sources import ModelSource, resolve_source
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.spec_decode.draft_model import DraftModel, DraftModelProposer
from backend.spec_decode.first_layers import first_layers
from backend.spec_decode.ngram import NgramProposer
from backend.spec_decode.proposer import Proposer
from backend.worker.decoders import make_decoder
from backend.worker.input_batch import InputBatch, StepInput
from backend.worker.model_runner import ModelRunner
from backend.worker.speculation import Draft, RoundDownload, Speculation
from backend.worker.speculative_batch import SpeculativeInputBatch, Verification
from backend.worker.step_tensors import to_device
from backend.worker.token_download import TokenDownload


class SpeculativeModelRunner(ModelRunner):
    """Drafts are made at the beginning of the step that verifies them. Steps without any are those of `ModelRunner`."""

    _batch_class = SpeculativeInputBatch

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        on_triton = config.kernels.backend == "triton"
        self._rejection_sampler = RejectionSampler(self._sampling_ops if on_triton else None)

    def _let_go(self) -> None:
        super()._let_go()
        self._draft_model: Decoder | None = None
        self._draft_caches: list[LayerCache] = []  # none where the draft's are the target's
        self._speculation: Speculation | None = None

    def load_model(self, source: ModelSource, on_progress: Callable[[float, float], None] | None = None) -> LoadedModel:
        """Also the draft model, if there is one. Raises `ConfigError` for one whose layers have windows of their own."""
        loaded = super().load_model(source, on_progress)
        settings = self._config.speculative
        if settings.method == "draft_model":
            if settings.model is None:
                self._draft_model = first_layers(loaded.model)
            else:
                draft = load_model(resolve_source(settings.model), device=self._device, dtype=self._dtype)
                self._draft_model = draft.model
                self._groups_of_draft(draft.config)  # that they exist
                both = {"weights_bytes": loaded.weights_bytes + draft.weights_bytes}
                loaded = self._loaded = replace(loaded, **both)
        return loaded

    @property
    def kv_groups(self) -> list[KVGroupSpec]:
        draft = self._own_draft
        if draft is None:
            return super().kv_groups
        groups = super().kv_groups
        shape = (draft.num_layers, draft.num_kv_heads, draft.head_dim, self._dtype.itemsize)
        num_bytes = KVGroupSpec(*shape, format=groups[0].format).bytes_per_token
        return [replace(group, draft_bytes_per_token=num_bytes) for group in groups]

    def notices(self, max_model_len: int) -> tuple[str, ...]:
        """A sentence for each limit of the drafts that the target has not."""
        limit = self._draft_model.config.max_position_embeddings if self._draft_model else max_model_len
        if limit >= max_model_len:
            return ()
        return (
            f"speculation is off for requests of more than {limit:,} tokens: that is the draft model's context, and "
            f"{max_model_len:,} is the target's.",
        )

    @property
    def longest_draft(self) -> int | None:
        """Tokens that a draft can have at most; None: any number."""
        return None

    @property
    def draft_cost(self) -> float:
        """Of a drafted token, in steps of the target: the draft's share of its parameters."""
        draft = self._draft_model
        return draft.config.count_parameters() / self.loaded.config.count_parameters() if draft else 0.0

    @property
    def _own_draft(self) -> DecoderConfig | None:
        """The draft model that has keys and values of its own."""
        return self._draft_model.config if self._draft_model and self._config.speculative.model else None

    def _groups_of_draft(self, draft: DecoderConfig) -> list[int]:
        """For each layer of a draft model, the KV group in whose blocks it has its slots: one with the same window."""
        windows = [group.window for group in self.layer_groups]
        if missing := [window for window in draft.windows if window not in windows]:
            own, ours = (_windows_in_words(each) for each in (missing, windows))
            raise ConfigError(
                f"speculative.model = {self._config.speculative.model!r} has layers {own}, and the target's are all {ours}: "
                "they cannot share blocks; allowed are drafts with the target's windows, or none named"
            )
        return [windows.index(window) for window in draft.windows]

    def _allocate_caches(self, num_blocks: int) -> None:
        super()._allocate_caches(num_blocks)
        draft = self._own_draft
        if draft is None:
            return
        sizes = (num_blocks, self._config.cache.block_size, draft.num_kv_heads, draft.head_dim)
        kv_format = KV_FORMATS[self._config.cache.dtype]
        try:
            self._draft_caches = [
                replace(LayerCache.zeros(*sizes, self._dtype, self._device, kv_format), group=group, window=window)
                for group, window in zip(self._groups_of_draft(draft), draft.windows, strict=True)
            ]
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the draft model's keys and values of {num_blocks:,} blocks do not fit the GPU beside the target's; lower "
                "cache.num_blocks or cache.gpu_memory_utilization"
            ) from error

    @property
    def _all_caches(self) -> list[LayerCache]:
        return [*self._layer_caches, *self._draft_caches]

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        super().initialize_kv_cache(num_blocks, max_model_len)
        self._speculation = Speculation(self._make_proposer(), self._rejection_sampler, self._device)

    def _make_proposer(self) -> Proposer:
        settings, model = self._config.speculative, self._draft_model
        if model is None:
            return NgramProposer(settings.ngram_min, settings.ngram_max, self._device)
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
        vocab_size = self.loaded.config.vocab_size
        return DraftModelProposer(draft, batch, vocab_size, budget, settings.num_speculative_tokens, self._device)

    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        assert self._speculation is not None
        self._speculation.update(scheduled)
        return super().submit(scheduled)

    def _run(self, batch: InputBatch, scheduled: SchedulerOutput) -> PendingOutput:
        assert isinstance(batch, SpeculativeInputBatch)
        speculation = self._speculation
        assert speculation is not None
        if not scheduled.num_draft_tokens and set(scheduled.kinds.values()) == {"decode"}:
            return speculation.watch(super()._run(batch, scheduled))
        batch.update(scheduled)
        speculation.follow(scheduled)
        draft = speculation.draft(batch.requests(scheduled)) if scheduled.num_draft_tokens else None
        if draft is not None:
            return speculation.watch(self._verify(batch, scheduled, draft))
        request_ids, outcomes = self._carry_out(batch.build(scheduled))
        return speculation.watch(TokenDownload(request_ids, outcomes, self._downloads, self._not_finite))

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
        verified = speculation.verify(logits[num_others:], draft, verification)
        last = verified.token_ids.gather(1, verified.num_accepted[:, None])[:, 0]
        self._record_tokens(last, verified.finite, self._upload(verification.rows), self._last_tokens)
        buffer = self._downloads.next(RoundDownload.num_bytes(draft))
        download = RoundDownload(others, draft, verified, buffer, self._not_finite)
        self._verified(step, verification, verified)
        return download

    def _verified(self, step: StepInput, verification: Verification, verified: VerifiedRound) -> None:
        """A step with drafts has been started, and its tokens are recorded."""

    def _run_drafted(self, step: StepInput, draft: Draft, verification: Verification) -> Tensor:
        """float32 [num_rows, vocab_size] of the step's `logits_indices` and, behind them, those of the verification."""
        speculation = self._speculation
        assert speculation is not None
        num_verified = len(verification.logits_indices)
        padding_rows = np.full(num_verified, self._last_tokens.numel() - 1, dtype=np.int64)
        step = replace(
            step,
            logits_indices=np.concatenate((step.logits_indices, verification.logits_indices)),
            sampled_rows=np.concatenate((step.sampled_rows, padding_rows)),
        )
        fill = partial(speculation.put_drafts, draft=draft, verification=verification)
        if self._mixed_graphs is not None and self._mixed_graphs.fits(step):
            return self._mixed_graphs.replay(step, self._uploads, fill).logits
        tensors = to_device(step, self._uploads, self._device)
        fill(tensors.token_ids)
        return self._logits(self._hidden(tensors)[tensors.logits_indices])


def _windows_in_words(windows: list[int | None]) -> str:
    words = ["without a window" if window is None else f"with a window of {window:,} tokens" for window in windows]
    return " and ".join(dict.fromkeys(words))
