"""From a config to an engine that is ready to serve: model, tokenizer, KV cache, and what was decided on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backend.config import EngineConfig
from backend.core.block_hash import BlockHash, prefix_key
from backend.core.kv_format import KV_FORMATS
from backend.core.kv_groups import KVGroupSpec
from backend.core.kv_layouts import resolve_layout
from backend.core.kv_windows import KVWindows
from backend.core.speculation import HEAD_METHODS, check_speculation, resolve_speculation
from backend.engine.llm_engine import LLMEngine
from backend.errors import CapacityError, ConfigError
from backend.metrics.stats import Phase
from backend.models.dummy import DUMMY_SHAPES
from backend.models.loader import LoadedModel
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.sources import ModelSource, resolve_source
from backend.spec_decode.heads.head_config import refuse_head
from backend.spec_decode.vocabulary import check_same_tokens
from backend.tokenizer import Tokenizer, load_tokenizer
from backend.worker.device import choose_device
from backend.worker.executor import InProcessExecutor
from backend.worker.head_runner import HeadModelRunner
from backend.worker.lookahead_runner import LookaheadModelRunner
from backend.worker.model_runner import DTYPES, ModelRunner
from backend.worker.speculative_runner import SpeculativeModelRunner
from backend.worker.tree_runner import TreeModelRunner

# By `speculative.method`; all others have a `SpeculativeModelRunner`.
_RUNNERS: dict[str, type[ModelRunner]] = {"none": ModelRunner} | dict.fromkeys(HEAD_METHODS, HeadModelRunner)
_RUNNERS["lookahead"] = LookaheadModelRunner


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is loaded. `notices` say, a sentence each, where the engine decided otherwise than asked."""

    resolved_config: EngineConfig
    model: Mapping[str, Any]
    load: Mapping[str, Any]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to serve, and what belongs to it."""

    engine: LLMEngine
    tokenizer: Tokenizer
    info: EngineInfo


def files_fingerprint(config: EngineConfig) -> object:
    """Changes when the files that a config names do: names, sizes and times. Raises `ModelError` for an unknown model."""
    source, draft = resolve_source(config.model.name), config.speculative.model
    folders = [source.path]
    if draft is not None:
        has_head = config.speculative.method in HEAD_METHODS
        folders.append(Path(draft).expanduser() if has_head else _resolve_draft(draft).path)
    files = [
        (path, path.stat().st_size, path.stat().st_mtime_ns)
        for folder in folders
        if folder is not None and folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".jinja", ".safetensors")
    ]
    return source, files


def load_engine(config: EngineConfig, on_phase: Callable[[Phase], None]) -> LoadedEngine:
    """Load what `config` asks for, on the calling thread, which owns the device from then on.

    Raises `ConfigError`, `ModelError` or `CapacityError`; nothing stays on the device then.
    """
    started = time.perf_counter()
    on_phase(Phase("loading"))
    source = resolve_source(config.model.name)
    decoder_config = _read_decoder_config(source)
    _check(config, source, decoder_config)
    device = choose_device(config)
    resolved = config.resolve(device=device, max_model_len=decoder_config.max_position_embeddings)
    tokenizer = load_tokenizer(source)
    if resolved.speculative.method == "draft_model" and resolved.speculative.model is not None:
        check_same_tokens(source, _resolve_draft(resolved.speculative.model))
    has_trees = resolved.speculative.tree
    runner_class = TreeModelRunner if has_trees else _RUNNERS.get(resolved.speculative.method, SpeculativeModelRunner)
    runner = runner_class(resolved)
    try:
        loaded = runner.load_model(
            source, lambda done, total: on_phase(Phase("loading", done / 2**20, total / 2**20, "MiB"))
        )
        resolved = resolved.with_overrides({"quantization": loaded.quantization.to_dict()})
        num_blocks = runner.determine_num_blocks()
        resolved, notices = _fit_to_pool(config, resolved, num_blocks, runner.kv_groups)
        resolved, layout_notices = resolve_layout(resolved)
        speculating = runner if isinstance(runner, SpeculativeModelRunner) else None
        draft_cost = speculating.cost if speculating else None
        longest_draft = speculating.longest_draft if speculating else None
        resolved, speculation_notices = resolve_speculation(resolved, longest_draft, draft_cost)
        assert resolved.model.max_model_len is not None
        if speculating:
            speculation_notices += speculating.notices(resolved.model.max_model_len)
        runner.initialize_kv_cache(num_blocks, resolved.model.max_model_len)
        runner.capture_cuda_graphs(
            resolved.model.max_model_len, lambda done, total: on_phase(Phase("capturing graphs", done, total, "graphs"))
        )
    except BaseException:
        runner.shutdown()
        raise
    eos_token_ids = decoder_config.eos_token_ids | tokenizer.eos_token_ids
    engine = LLMEngine(
        resolved,
        InProcessExecutor(runner),
        tokenizer,
        runner.kv_groups,
        decoder_config.vocab_size,
        eos_token_ids,
        _prefix_key(resolved, source, decoder_config),
        draft_cost,
    )
    memory = runner.memory()
    info = EngineInfo(
        resolved_config=resolved,
        model=_describe_model(source, loaded),
        load={
            "total_seconds": time.perf_counter() - started,
            "weights_seconds": loaded.load_seconds,
            "weights_bytes": loaded.weights_bytes,
            "num_quantized_layers": loaded.num_quantized_layers,
            "unquantized_layers": list(loaded.unquantized_layers),
            "emulated_quantization": loaded.emulated_quantization,
            "kv_cache_bytes": memory.kv_cache_bytes,
            "kv_bytes_per_token": _bytes_per_token(runner.kv_groups[0], decoder_config.num_layers),
            "num_blocks": num_blocks,
            "tile_table": _tile_table(resolved),
        },
        notices=(*loaded.notices, *notices, *layout_notices, *speculation_notices),
    )
    return LoadedEngine(engine, tokenizer, info)


def _tile_table(resolved: EngineConfig) -> str | None:
    """The measured tiles that linear layers take; None: none are."""
    if resolved.kernels.backend != "triton" or resolved.kernels.batch_invariant:
        return None
    from kernels.tuning import load_table  # needs triton, which a CPU does without

    return load_table(torch.device(resolved.model.device), DTYPES[resolved.model.dtype]).name


def _resolve_draft(model: str) -> ModelSource:
    """Raises `ConfigError` for the folder of a head, and as `resolve_source`."""
    refuse_head(model)
    return resolve_source(model)


def _prefix_key(resolved: EngineConfig, source: ModelSource, decoder_config: DecoderConfig) -> BlockHash | None:
    """All that decides the KV of a token besides the tokens before it; None when the cache is off."""
    if not resolved.cache.enable_prefix_caching:
        return None
    return prefix_key(
        source=repr(source),
        model=asdict(decoder_config),
        revision=resolved.model.revision,
        dtype=resolved.model.dtype,
        kv_dtype=resolved.cache.dtype,
        quantization=resolved.quantization.to_dict(),
    )


def _read_decoder_config(source: ModelSource) -> DecoderConfig:
    if source.path is not None:
        return load_decoder_config(source.path)
    return DUMMY_SHAPES[source.shape or ""]


def _check(config: EngineConfig, source: ModelSource, decoder_config: DecoderConfig) -> None:
    asked, model_context = config.model.max_model_len, decoder_config.max_position_embeddings
    if asked is not None and asked > model_context:
        raise ConfigError(
            f"model.max_model_len = {asked:,} is above the context of {source.name}, {model_context:,} tokens"
        )
    if config.model.revision is not None:
        raise ConfigError(
            f"model.revision = {config.model.revision!r}: {source.name} is a local model and has no revisions"
        )
    if config.kernels.batch_invariant and (config.quantization.method or decoder_config.stored_quantization):
        what = f"quantization.method = {config.quantization.method!r}" if config.quantization.method else source.name
        raise ConfigError(
            f"kernels.batch_invariant = True does not go together with {what}: the products of quantized weights sum in an "
            "order that depends on the batch"
        )
    check_speculation(config)
    if problem := KV_FORMATS[config.cache.dtype].problem(decoder_config.head_dim):
        raise ConfigError(f"cache.dtype = {config.cache.dtype!r}: {problem}; allowed are 'auto', 'fp8_e4m3', 'int8'")


def _fit_to_pool(
    config: EngineConfig, resolved: EngineConfig, num_blocks: int, groups: Sequence[KVGroupSpec]
) -> tuple[EngineConfig, tuple[str, ...]]:
    """Cut the longest request to what the pool can hold, so that any admitted request can finish by itself."""
    budget = resolved.scheduler.max_num_batched_tokens
    assert resolved.model.max_model_len is not None
    assert budget is not None
    windows = [None if resolved.cache.layout == "contiguous" else group.window for group in groups]
    needs = KVWindows(windows, resolved.cache.block_size, budget)
    length = needs.longest_request(num_blocks, resolved.model.max_model_len)
    if length < 2:
        tables = f" in each of its {len(groups)} KV groups" if len(groups) > 1 else ""
        raise CapacityError(
            f"cache.num_blocks = {num_blocks} of {resolved.cache.block_size} token holds no prompt and output together"
            f"{tables}; two tokens are the least"
        )
    notices = ()
    if length < resolved.model.max_model_len:
        wanted = "asked for" if config.model.max_model_len else "the model's own"
        notices = (
            f"model.max_model_len is {length:,} tokens instead of {resolved.model.max_model_len:,} ({wanted}): "
            f"the KV cache of {num_blocks:,} blocks holds no more.",
        )
    return resolved.with_overrides({"cache.num_blocks": num_blocks, "model.max_model_len": length}), notices


def _bytes_per_token(group: KVGroupSpec, num_layers: int) -> int:
    """Of all layers of the model, which are alike, without those that pad a group."""
    return replace(group, num_layers=num_layers).bytes_per_token


def _describe_model(source: ModelSource, loaded: LoadedModel) -> dict[str, Any]:
    described = asdict(loaded.config)
    described["eos_token_ids"] = sorted(loaded.config.eos_token_ids)
    return {"name": source.name, "num_parameters": loaded.num_parameters, **described}
