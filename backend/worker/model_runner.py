"""`ModelRunner`: the model, its KV cache and the sampler on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import LayerCache
from backend.config import EngineConfig
from backend.core.kv_format import KV_FORMATS
from backend.core.kv_groups import KVGroupSpec, LayerGroup, group_layers
from backend.core.kv_windows import KVWindows
from backend.core.output import FinishedOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from backend.errors import CapacityError
from backend.metrics.stats import MemoryUse
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.sample.metadata import SamplingMetadata, copy_to
from backend.sample.sampler import REFERENCE_OPS, SampledTensors, Sampler, triton_ops
from backend.worker.block_transfer import BlockTransfer, DeviceBlocks, HostBlocks, copy_blocks
from backend.worker.decoders import StepDecoder, make_decoder
from backend.worker.input_batch import InputBatch, StepInput
from backend.worker.kv_cache import KVCacheShape
from backend.worker.memory_profile import GRAPH_BYTES, free_after_profile_run
from backend.worker.out_of_memory import is_out_of_memory
from backend.worker.step_tensors import HostBuffers, StepTensors, to_device
from backend.worker.token_download import TokenDownload
from kernels.reference.record_tokens import record_tokens as reference_record_tokens

if TYPE_CHECKING:
    from backend.worker.decode_graphs import DecodeGraphs, DecodeOutput
    from backend.worker.graph_pass import Keep
    from backend.worker.graphs import GraphSet
    from backend.worker.mixed_graphs import MixedGraphs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Owns every tensor of the engine. Built, used and shut down on one thread."""

    _batch_class: type[InputBatch] = InputBatch
    _has_trees = False  # whether rows of a mixed step in graphs may be nodes of trees

    def __init__(self, config: EngineConfig) -> None:
        """Args:
        config: resolved but for `cache.num_blocks` and `model.max_model_len`, which depend on memory.
        """
        self._config = config
        self._device = torch.device(config.model.device)
        self._dtype = DTYPES[config.model.dtype]
        if config.kernels.backend == "triton":
            from kernels.ops.record_tokens import record_tokens  # needs triton, which a CPU does without

            self._record_tokens, self._sampling_ops = record_tokens, triton_ops()
        else:
            self._record_tokens, self._sampling_ops = reference_record_tokens, REFERENCE_OPS
        self._sampler = Sampler(self._sampling_ops)
        self._transfer = BlockTransfer(self._device)
        self._uploads, self._downloads = HostBuffers(self._device), HostBuffers(self._device)
        self._not_finite = (
            "the model's logits are not finite for this request: a value overflowed in "
            f"{config.model.dtype}, or a weight is damaged"
        )
        self._let_go()
        if config.model.device == "cpu" and config.kernels.cpu_threads:
            torch.set_num_threads(config.kernels.cpu_threads)

    def _let_go(self) -> None:
        self._loaded: LoadedModel | None = None
        self._decoder: StepDecoder | None = None
        self._attention: AttentionBackend | None = None
        self._layer_caches: list[LayerCache] = []
        self._host_blocks: HostBlocks | None = None  # None: no request is swapped
        self._sampled_token_ids: Tensor | None = None  # int64 [max_num_seqs + 1]; the last is for padding
        self._batch: InputBatch | None = None
        self._decode_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._draws_again = False  # that the last step drew and banned nothing, and so does one that repeats it

    def load_model(self, source: ModelSource, on_progress: Callable[[float, float], None] | None = None) -> LoadedModel:
        """Read the weights onto the device; `on_progress` gets bytes done and in all."""
        try:
            self._loaded = load_model(
                source,
                device=self._device,
                dtype=self._dtype,
                quantization=self._config.quantization,
                on_progress=on_progress,
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"{source.name} does not fit the GPU in {self._config.model.dtype}: choose a smaller model, make its weights "
                "smaller with model.dtype or quantization.method, or free the card"
            ) from error
        self._decoder, self._attention = make_decoder(self._loaded.model, self._config.kernels)
        return self._loaded

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise RuntimeError("no model is loaded")
        return self._loaded

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return group_layers(self.loaded.config.windows)

    @property
    def kv_groups(self) -> list[KVGroupSpec]:
        """One for each of `layer_groups`; their blocks have one size."""
        config, groups = self.loaded.config, self.layer_groups
        kv_format = KV_FORMATS[self._config.cache.dtype]
        num_layers = max(len(group.layers) for group in groups)
        parts = (num_layers, config.num_kv_heads, config.head_dim, self._dtype.itemsize)
        return [KVGroupSpec(*parts, window=group.window, format=kv_format) for group in groups]

    @property
    def kv_cache_shape(self) -> KVCacheShape:
        return KVCacheShape(self.kv_groups[0], self._config.cache.block_size, self._dtype, self.layer_groups)

    @torch.inference_mode()
    def determine_num_blocks(self) -> int:
        """Usable KV blocks: as configured, or what the memory settings leave, but no more than could ever be used."""
        cache, scheduler = self._config.cache, self._config.scheduler
        if cache.num_blocks is not None:
            return cache.num_blocks
        shape = self.kv_cache_shape
        assert scheduler.max_num_seqs is not None
        assert self._config.model.max_model_len is not None
        assert scheduler.max_num_batched_tokens is not None
        slides = cache.layout == "paged" and not cache.enable_prefix_caching  # else what is behind a window has its use
        windows = [group.window if slides else None for group in self.layer_groups]
        needs = KVWindows(windows, cache.block_size, scheduler.max_num_batched_tokens)
        useful = scheduler.max_num_seqs * needs.peak_blocks(self._config.model.max_model_len)
        if self._device.type == "cpu":
            room = shape.blocks_in(cache.cpu_bytes, f"cache.cpu_bytes = {cache.cpu_bytes:,}")
        else:
            assert self._decoder is not None
            assert self._attention is not None
            parts = (self._decoder, self._attention, self._sampler, shape)
            free = free_after_profile_run(self._config, *parts, self._graph_bytes)
            room = shape.blocks_in(free, f"cache.gpu_memory_utilization = {cache.gpu_memory_utilization}")
        return min(room, useful)

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate `num_blocks` usable blocks per layer, and room for requests of up to `max_model_len` tokens.

        Raises `CapacityError` when the device has too little memory.
        """
        max_num_seqs, block_size = self._config.scheduler.max_num_seqs, self._config.cache.block_size
        assert max_num_seqs is not None
        self._allocate_caches(num_blocks)
        if self._config.scheduler.preemption == "swap" and self._config.cache.layout == "paged":
            self._host_blocks = HostBlocks.allocate(self._config, self.kv_groups[0], DeviceBlocks(self._all_caches))
        self._sampled_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)
        self._batch = self._batch_class(max_num_seqs, max_model_len, block_size, len(self.layer_groups))

    def _allocate_caches(self, num_blocks: int) -> None:
        self._layer_caches = self.kv_cache_shape.allocate(num_blocks, self._device)

    def capture_cuda_graphs(self, max_model_len: int, on_progress: Callable[[int, int], None]) -> None:
        """Capture the graphs of steps, if this engine has any; `on_progress` gets graphs done and in all.

        Raises `CapacityError` when there is no memory left for them.
        """
        if self._config.kernels.enforce_eager:
            return
        from backend.worker.graphs import capture_graphs  # needs triton, which a CPU does without

        assert self._decoder is not None
        assert self._attention is not None
        assert self._sampled_token_ids is not None
        try:
            self._decode_graphs, self._mixed_graphs = capture_graphs(
                self._config,
                self._decoder,
                self._attention,
                self._layer_caches,
                self._sampled_token_ids,
                vocab_size=self.loaded.config.vocab_size,
                max_model_len=max_model_len,
                num_groups=len(self.layer_groups),
                num_logits=self._num_logits,
                on_progress=on_progress,
                keep=self._keep,
                has_trees=self._has_trees,
                more=self._more_graphs,
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                "the GPU has no memory left for the CUDA graphs of a step; lower cache.gpu_memory_utilization, "
                "cache.num_blocks or scheduler.max_num_seqs, or set kernels.enforce_eager = true"
            ) from error

    @property
    def _graph_bytes(self) -> int:
        """What CUDA graphs take of the device beside the activations of a step."""
        return GRAPH_BYTES

    @property
    def _num_logits(self) -> int:
        """Rows of logits that a step in graphs may want, beyond one for each request."""
        return 0

    @property
    def _keep(self) -> Keep | None:
        """What graphs are to keep of each pass of the model; None: nothing."""
        return None

    def _more_graphs(self, decode: DecodeGraphs, mixed: MixedGraphs, logits: Tensor) -> Sequence[GraphSet]:
        """Captured behind those of the steps."""
        return ()

    @torch.inference_mode()
    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        """Start a step: forward over every scheduled token, sample where a request's last token is among them.

        On CUDA this returns while the device works; on a CPU the step is done. Raises `CapacityError` when the device
        runs out of memory.
        """
        batch = self._batch
        if batch is None:
            raise RuntimeError("the KV cache is not initialized")
        try:
            if scheduled.swapped_out or scheduled.swapped_in or scheduled.block_copies:
                self._move_blocks(scheduled)
            if not scheduled.num_scheduled_tokens:
                batch.update(scheduled)
                return FinishedOutput(ModelRunnerOutput({}))  # a step that could only preempt
            return self._run(batch, scheduled)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"the GPU ran out of memory in a step of {scheduled.total_num_scheduled_tokens:,} tokens; lower "
                "cache.gpu_memory_utilization or scheduler.max_num_batched_tokens"
            ) from error

    def _run(self, batch: InputBatch, scheduled: SchedulerOutput) -> PendingOutput:
        """A step with tokens."""
        batch.update(scheduled)
        return self._run_plain(batch, scheduled)

    def _run_plain(self, batch: InputBatch, scheduled: SchedulerOutput) -> PendingOutput:
        """A step that the batch knows of, without drafts."""
        request_ids, outcomes = self._repeat(batch, scheduled) or self._carry_out(batch.build(scheduled))
        return TokenDownload(request_ids, outcomes, self._downloads, self._not_finite)

    def _move_blocks(self, scheduled: SchedulerOutput) -> None:
        """Whatever the step then writes is queued behind it."""
        if self._host_blocks is not None:
            pool = DeviceBlocks(self._all_caches)
            self._transfer.copy(scheduled.swapped_out, pool, self._host_blocks)
            self._transfer.copy(scheduled.swapped_in, self._host_blocks, pool)
        if scheduled.block_copies:
            copy_blocks(self._all_caches, scheduled.block_copies)

    def _repeat(self, batch: InputBatch, scheduled: SchedulerOutput) -> tuple[list[str], Tensor] | None:
        """`_carry_out` of a step that the graph of the last one goes on to by itself; None where it is another one."""
        graphs = self._decode_graphs
        num_blocks = batch.repeats(scheduled) if graphs is not None else None
        if graphs is None or num_blocks is None or not graphs.holds(num_blocks):
            return None
        step = batch.build_repeat(scheduled, with_sampling=not self._draws_again)
        output = graphs.replay_again(step, self._uploads)
        if self._draws_again:
            return step.request_ids, graphs.draw(len(step.request_ids))
        if step.sampling is None:
            return step.request_ids, output.outcomes
        return step.request_ids, self._draw(graphs, output, step.sampling, step.rows)

    def _draw(self, graphs: DecodeGraphs, output: DecodeOutput, sampling: SamplingMetadata, rows: np.ndarray) -> Tensor:
        """`_sample` of a step that may be repeated."""
        if any(sampling.banned_token_ids):
            return self._sample(output.logits, sampling, self._upload(rows))
        self._draws_again = True
        graphs.start_draws(sampling, self._uploads)
        return graphs.draw(len(rows))

    def _carry_out(self, step: StepInput) -> tuple[list[str], Tensor]:
        """The requests that the step samples, and what becomes of each: see `_sample`."""
        graphs, self._draws_again = self._decode_graphs, False
        if graphs is not None:
            if graphs.fits(step):
                return step.sampled_request_ids, self._replay(graphs, step)
            graphs.forget()
        if self._mixed_graphs is not None and self._mixed_graphs.fits(step):
            output = self._mixed_graphs.replay(step, self._uploads)
            if step.sampling is None:
                return step.sampled_request_ids, output.outcomes
            rows = self._upload(step.sampled_rows)
            return step.sampled_request_ids, self._sample(output.logits, step.sampling, rows)
        return step.sampled_request_ids, self._forward(step)

    def _replay(self, graphs: DecodeGraphs, step: StepInput) -> Tensor:
        output = graphs.replay(step, self._uploads)
        if len(step.sampled_reqs) == step.num_reqs:
            if step.sampling is None:
                return output.outcomes
            return self._draw(graphs, output, step.sampling, step.sampled_rows)
        # Rows that are in the middle of their prompt have no token; they come with small budgets only.
        reqs = self._upload(step.sampled_reqs)
        if step.sampling is None:
            return output.outcomes[reqs]
        return self._sample(output.logits[reqs], step.sampling, self._upload(step.sampled_rows))

    def _upload(self, array: np.ndarray) -> Tensor:
        return copy_to(array, self._device)

    def _forward(self, step: StepInput) -> Tensor:
        tensors = to_device(step, self._uploads, self._device)
        hidden = self._hidden(tensors)
        if not step.sampled_request_ids:
            return tensors.sampled_rows
        return self._sample(self._logits(hidden[tensors.logits_indices]), step.sampling, tensors.sampled_rows)

    def _hidden(self, tensors: StepTensors) -> Tensor:
        """What the decoder gives for a step's tokens, [num_tokens, hidden]."""
        assert self._decoder is not None
        assert self._attention is not None
        tokens = (tensors.token_ids, tensors.token_rows, self._last_tokens)
        return self._decoder.forward(*tokens, self._layer_caches, tensors.metadata, self._attention)

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self._decoder is not None
        return self._decoder.compute_logits(hidden)

    @property
    def _all_caches(self) -> list[LayerCache]:
        """Everything that a block holds."""
        return self._layer_caches

    @property
    def _last_tokens(self) -> Tensor:
        assert self._sampled_token_ids is not None
        return self._sampled_token_ids

    def _sample(self, logits: Tensor, sampling: SamplingMetadata | None, rows: Tensor) -> Tensor:
        """Each row's token, int64, or -1 where its logits are not finite. It becomes the last one of its request."""
        if sampling is None:
            return self._record(SampledTensors(*self._sampling_ops.greedy_tokens(logits)), rows)
        return self._record(self._sampler(logits, sampling), rows)

    def _record(self, sampled: SampledTensors, rows: Tensor) -> Tensor:
        return self._record_tokens(sampled.token_ids, sampled.finite, rows, self._last_tokens)

    def memory(self) -> MemoryUse:
        """Bytes held now. Safe from any thread."""
        on_cuda = self._device.type == "cuda"
        # Layers of different KV groups share tensors.
        kv_tensors = {tensor.data_ptr(): tensor for cache in self._all_caches for tensor in cache.tensors()}
        return MemoryUse(
            weights_bytes=self._loaded.weights_bytes if self._loaded else 0,
            kv_cache_bytes=sum(tensor.nbytes for tensor in kv_tensors.values()),
            device_memory_bytes=torch.cuda.memory_allocated(self._device) if on_cuda else None,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else None,
        )

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def shutdown(self) -> None:
        """Let go of every tensor and give the card its memory back."""
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a graph must not be destroyed while it runs
        finally:
            self._let_go()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
