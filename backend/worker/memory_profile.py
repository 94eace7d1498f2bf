"""How much of the card is left for KV blocks: measured by running the largest steps there may be."""

from __future__ import annotations

import torch

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata
from backend.config import EngineConfig
from backend.errors import CapacityError
from backend.sample.metadata import SamplingMetadata
from backend.sample.sampler import Sampler
from backend.sampling_params import SamplingParams
from backend.worker.decoders import StepDecoder
from backend.worker.graph_sizes import mixed_sizes
from backend.worker.kv_cache import KVCacheShape
from backend.worker.out_of_memory import is_out_of_memory

# What the CUDA graphs keep of the card beside their tensors: about 2 MiB of kernel nodes each, and their pool's rounding.
GRAPH_BYTES = 256 * 2**20
# Of each size of a round and length of its drafts: nodes of a pass of the target, and of the draft's and the head's.
ROUND_GRAPH_BYTES = 8 * 2**20
OBSERVE_GRAPHS_BYTES = 64 * 2**20  # of what heads read of all other steps: the nodes of a layer each


def free_after_profile_run(
    config: EngineConfig,
    decoder: StepDecoder,
    attention: AttentionBackend,
    sampler: Sampler,
    shape: KVCacheShape,
    graph_bytes: int = GRAPH_BYTES,
) -> int:
    """Bytes of the card's share that remain after the weights, the largest step's activations and the CUDA graphs.

    Args:
        graph_bytes: of the graphs beside a step's activations.
    Raises `CapacityError` when the largest step does not fit.
    """
    device = torch.device(config.model.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free  # weights, this process' context and whatever else is on the card
    try:
        activations = _profile_run(config, decoder, attention, sampler, shape, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            "the largest step does not fit the GPU beside the weights; lower scheduler.max_num_batched_tokens, "
            "scheduler.max_num_seqs or model.max_model_len"
        ) from error
    torch.cuda.empty_cache()
    graphs = 0
    if not config.kernels.enforce_eager:
        budget = config.scheduler.max_num_batched_tokens
        assert budget is not None
        sizes = mixed_sizes(budget, decoder.launch_bound)
        graphs = graph_bytes + (activations * sizes[-1] // budget if sizes else 0)
    return int(total * config.cache.gpu_memory_utilization) - used - activations - graphs


def _profile_run(
    config: EngineConfig,
    decoder: StepDecoder,
    attention: AttentionBackend,
    sampler: Sampler,
    shape: KVCacheShape,
    device: torch.device,
) -> int:
    """Peak bytes of a step as large as the scheduler may make it.

    A full token budget at the end of the longest context, and sampling for as many rows as there may be requests. The
    context's blocks are all the same few: what counts is how much attention reads, not what.
    """
    budget, max_num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    length = config.model.max_model_len
    assert budget is not None
    assert max_num_seqs is not None
    assert length is not None
    query_len = min(budget, length)
    num_reqs = -(-budget // query_len)
    num_tokens, blocks_each = num_reqs * query_len, -(-length // config.cache.block_size)
    caches = shape.allocate(1, device)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * query_len,
        seq_lens=torch.full((num_reqs,), length, dtype=torch.int32, device=device),
        block_table=torch.ones((num_reqs, blocks_each), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.arange(length - query_len, length, device=device).repeat(num_reqs),
        num_decodes=num_reqs if query_len == 1 else 0,
    )
    others = max(0, len(shape.layer_groups) - 1)
    metadata = metadata.with_groups([metadata.block_table] * others, [metadata.slot_mapping] * others)
    speculative = config.speculative
    drafts = speculative.num_speculative_tokens if speculative.method != "none" else 0
    rows = min(max_num_seqs * (1 + drafts), num_tokens)
    sampled = SamplingParams(temperature=1.0, top_p=0.9)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = decoder.forward(zeros, zeros, zeros[:1], caches, metadata, attention)
    logits = decoder.compute_logits(hidden[:rows])
    sampler(logits, SamplingMetadata([sampled] * rows, [0] * rows, [()] * rows))
    if speculative.draft_tree is not None:
        del logits
        rows = min(max_num_seqs * len(speculative.draft_tree), num_tokens)
        # Verification keeps them padded and, for some, with banned ids beside them.
        _ = [decoder.compute_logits(hidden[:rows]) for _ in range(3)]
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held
