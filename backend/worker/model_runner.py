"""`ModelRunner`: the model, its KV cache and the sampler on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.config import EngineConfig
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.output import ModelRunnerOutput, SchedulerOutput
from backend.errors import CapacityError
from backend.metrics.stats import MemoryUse
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.sample.metadata import SamplingMetadata
from backend.sample.sampler import Sampler
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import InputBatch
from backend.worker.kv_cache import KVCacheShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Owns every tensor of the engine. Built, used and shut down on one thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Args:
        config: resolved but for `cache.num_blocks` and `model.max_model_len`, which depend on memory.
        """
        self._config = config
        self._device = torch.device(config.model.device)
        self._dtype = DTYPES[config.model.dtype]
        self._attention = ReferenceAttention()
        self._sampler = Sampler()
        self._loaded: LoadedModel | None = None
        self._layer_caches: list[LayerCache] = []
        self._batch: InputBatch | None = None
        if config.model.device == "cpu" and config.kernels.cpu_threads:
            torch.set_num_threads(config.kernels.cpu_threads)

    def load_model(self, source: ModelSource, on_progress: Callable[[float, float], None] | None = None) -> LoadedModel:
        """Read the weights onto the device; `on_progress` gets bytes done and in all."""
        try:
            self._loaded = load_model(source, device=self._device, dtype=self._dtype, on_progress=on_progress)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{source.name} does not fit the GPU in {self._config.model.dtype}: choose a smaller model or free the card"
            ) from error
        return self._loaded

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise RuntimeError("no model is loaded")
        return self._loaded

    @property
    def kv_group(self) -> KVGroupSpec:
        config = self.loaded.config
        return KVGroupSpec(config.num_layers, config.num_kv_heads, config.head_dim, self._dtype.itemsize)

    @property
    def kv_cache_shape(self) -> KVCacheShape:
        return KVCacheShape(self.kv_group, self._config.cache.block_size, self._dtype)

    @torch.inference_mode()
    def determine_num_blocks(self) -> int:
        """Usable KV blocks: as configured, or what the memory settings leave, but no more than could ever be used."""
        cache = self._config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        shape = self.kv_cache_shape
        scheduler = self._config.scheduler
        assert scheduler.max_num_seqs is not None
        assert self._config.model.max_model_len is not None
        useful = scheduler.max_num_seqs * -(-self._config.model.max_model_len // cache.block_size)
        if self._device.type == "cpu":
            room = shape.blocks_in(cache.cpu_bytes, f"cache.cpu_bytes = {cache.cpu_bytes:,}")
        else:
            what = f"cache.gpu_memory_utilization = {cache.gpu_memory_utilization}"
            room = shape.blocks_in(self._free_after_profile_run(), what)
        return min(room, useful)

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate `num_blocks` usable blocks per layer, and room for requests of up to `max_model_len` tokens.

        Raises `CapacityError` when the device has too little memory.
        """
        self._layer_caches = self.kv_cache_shape.allocate(num_blocks, self._device)
        assert self._config.scheduler.max_num_seqs is not None
        self._batch = InputBatch(
            self._config.scheduler.max_num_seqs, max_model_len, self._config.cache.block_size, self._device
        )

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: forward over every scheduled token, sample where a request's last token was among them."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("the KV cache is not initialized")
        batch.update(scheduled)
        if not scheduled.num_scheduled_tokens:
            return ModelRunnerOutput({})  # a step that could only preempt
        step = batch.build(scheduled)
        model = self.loaded.model
        hidden = model(step.token_ids, step.metadata.positions, self._layer_caches, step.metadata, self._attention)
        if not step.sampled_request_ids:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # else this step's time would show up in the next one
            return ModelRunnerOutput({})
        sampled = self._sampler(model.compute_logits(hidden[step.logits_indices]), step.sampling)
        token_ids, errors = {}, {}
        for request_id, token_id, finite in zip(
            step.sampled_request_ids, sampled.token_ids, sampled.finite, strict=True
        ):
            if finite:
                batch.append(request_id, token_id)
                token_ids[request_id] = [token_id]
            else:
                errors[request_id] = (
                    "the model's logits are not finite for this request: a value overflowed in "
                    f"{self._config.model.dtype}, or a weight is damaged"
                )
        return ModelRunnerOutput(token_ids, errors)

    def memory(self) -> MemoryUse:
        """Bytes held now. Safe from any thread."""
        on_cuda = self._device.type == "cuda"
        kv_tensors = [tensor for cache in self._layer_caches for tensor in (cache.key_cache, cache.value_cache)]
        return MemoryUse(
            weights_bytes=self._loaded.weights_bytes if self._loaded else 0,
            kv_cache_bytes=sum(tensor.nbytes for tensor in kv_tensors),
            device_memory_bytes=torch.cuda.memory_allocated(self._device) if on_cuda else None,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else None,
        )

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def shutdown(self) -> None:
        """Let go of every tensor and give the card its memory back."""
        self._loaded, self._layer_caches, self._batch = None, [], None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _free_after_profile_run(self) -> int:
        """Bytes of the card's share that remain after the weights and the largest step's activations."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        try:
            activations = self._profile_run()
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                "the largest step does not fit the GPU beside the weights; lower scheduler.max_num_batched_tokens, "
                "scheduler.max_num_seqs or model.max_model_len"
            ) from error
        torch.cuda.empty_cache()
        used = total - free  # weights, this process' context and whatever else is on the card
        return int(total * self._config.cache.gpu_memory_utilization) - used - activations

    def _profile_run(self) -> int:
        """Peak bytes of a step as large as the scheduler may make it.

        A full token budget at the end of the longest context, and sampling for as many rows as there may be requests. The
        context's blocks are all the same few: what counts is how much attention reads, not what.
        """
        scheduler, model_settings = self._config.scheduler, self._config.model
        assert scheduler.max_num_batched_tokens is not None
        assert scheduler.max_num_seqs is not None
        assert model_settings.max_model_len is not None
        length = model_settings.max_model_len
        query_len = min(scheduler.max_num_batched_tokens, length)
        num_reqs = -(-scheduler.max_num_batched_tokens // query_len)
        num_tokens, blocks_each = num_reqs * query_len, -(-length // self._config.cache.block_size)
        caches = self.kv_cache_shape.allocate(1, self._device)
        positions = torch.arange(length - query_len, length, device=self._device).repeat(num_reqs)
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=self._device) * query_len,
            seq_lens=torch.full((num_reqs,), length, dtype=torch.int32, device=self._device),
            block_table=torch.ones((num_reqs, blocks_each), dtype=torch.int32, device=self._device),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=self._device),
            positions=positions,
        )
        rows = min(scheduler.max_num_seqs, num_tokens)
        sampled = SamplingParams(temperature=1.0)
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        model = self.loaded.model
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        hidden = model(token_ids, positions, caches, metadata, self._attention)
        self._sampler(model.compute_logits(hidden[:rows]), SamplingMetadata([sampled] * rows, [0] * rows, [()] * rows))
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - held
