"""What the Run form asks, in words. Which values are allowed comes from the settings themselves. No Streamlit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.components.fields import Field, fields_of
from backend.config import EngineConfig
from backend.sampling_params import SamplingSettings
from backend.workload.spec import (
    ConversationsSource,
    GammaRate,
    MooncakeSource,
    PromptsSource,
    ServiceLevel,
    SharedPrefixSource,
    SyntheticSource,
    TraceSource,
    TraceTimes,
    Workload,
)

MODEL = "model.name"
SOURCE = "workload.source"
ARRIVALS = "workload.arrivals.kind"
OUTPUT_LEN = "workload.output_len"
TEMPERATURE = "workload.sampling.temperature"
OVERRIDES = "overrides"
LABEL = "label"

SOURCES = {
    "built_in": "16 chat prompts",
    "own": "Your own prompts",
    "file": "Prompts from a JSONL file",
    "synthetic": "Synthetic token ids",
    "shared_prefix": "Shared prefixes",
    "conversations": "Conversations",
    "trace": "Azure trace (CSV)",
    "mooncake": "Mooncake trace (JSONL)",
}
TRACES = ("trace", "mooncake")  # the sources that bring arrival times along
ARRIVAL_KINDS = {
    "all_at_once": "All at once",
    "closed_loop": "Closed loop",
    "constant": "Constant rate",
    "poisson": "Poisson",
    "gamma": "Gamma",
    "trace": "Times of the trace",
}
LENGTH_KINDS = {"fixed": "Fixed", "uniform": "Uniform", "normal": "Normal"}

# A length that varies asks for these in place of one number.
LENGTH_PARTS = {"fixed": ("value",), "uniform": ("min", "max"), "normal": ("mean", "std", "min", "max")}


_HELP = {
    "scheduler.max_num_seqs": "More share a step and raise throughput; each of them then waits longer. Auto: CUDA 256, "
    "CPU 16.",
    "scheduler.max_num_batched_tokens": "Token budget of one step: small keeps decoding smooth, large prefills faster. "
    "Auto: CUDA 8,192, CPU 512.",
    "scheduler.policy": "fcfs: decodes first, prompts with what is left. prefill_first: prompts whole, decodes stall "
    "meanwhile. priority: the lowest number first; workload.priorities deals the numbers out.",
    "workload.source.prompts": "One prompt a line.",
    "workload.source.file": "A path on this machine, one JSON object a line.",
    "workload.source.num_requests": "More requests steady the figures and take longer.",
    "workload.source.groups": "Distinct prefixes: more groups share less.",
    "workload.source.prompts_per_group": "Prompts that begin with the same prefix.",
    "workload.source.prefix_len": "Tokens that the prompts of a group share.",
    "workload.source.prompt_len": "Tokens per prompt: longer ones cost prefill and KV cache.",
    "workload.source.suffix_len": "Tokens per prompt after the shared prefix.",
    "workload.source.num_conversations": "More conversations keep more KV between turns.",
    "workload.source.turns": "Each turn's prompt is all before it, answers included, and new tokens.",
    "workload.source.first_len": "Tokens of a conversation's first prompt.",
    "workload.source.turn_len": "Tokens that each further turn adds.",
    "workload.source.think_time_s": "Mean pause between an answer and the next turn: longer ones let the cache forget.",
    "workload.source.block_len": "Prompt tokens per hash id: equal ids are equal tokens.",
    "workload.source.scale": "Divides all lengths, the blocks' too: long traces fit small models.",
    "workload.source.max_prompt_len": "Longer prompts are cut; the model's context cuts them in any case.",
    "workload.source.max_output_len": "Longer answers are cut.",
    "workload.arrivals.concurrency": "Requests in flight: more raise throughput and the wait of each.",
    "workload.arrivals.rate": "Above what the engine can do, the queue only grows.",
    "workload.arrivals.burstiness": "1 is Poisson; below, requests come in bursts, above, more evenly.",
    "workload.arrivals.speedup": "Above 1 the trace is replayed faster than it was recorded.",
    "workload.sampling.n": "Parallel samples: the prompt is computed once, and each is a request of its own in the figures.",
    "workload.slo.ttft_ms": "The latest first token that still counts for goodput.",
    "workload.slo.tpot_ms": "The slowest output token that still counts for goodput.",
    "workload.seed": "Same seed: same prompts, lengths, arrivals and draws.",
}
_LABELS = {
    "model.max_model_len": "Context length",
    "cache.num_blocks": "KV blocks",
    "cache.gpu_memory_utilization": "GPU memory share",
    "cache.cpu_bytes": "KV cache on the CPU (MiB)",
    "scheduler.max_num_seqs": "Requests per step",
    "scheduler.max_num_batched_tokens": "Tokens per step",
    "scheduler.async_scheduling": "Schedule ahead",
    "kernels.backend": "Kernels",
    "kernels.enforce_eager": "Without CUDA graphs",
    "kernels.batch_invariant": "Batch-invariant sums",
    "kernels.cpu_threads": "CPU threads",
    "model.dtype": "Weights and activations",
    "cache.dtype": "Keys and values",
    "quantization.method": "Quantization",
    "quantization.granularity": "Scales of fp8",
    "quantization.threshold": "Outlier threshold",
    "quantization.head": "Output head",
    "quantization.skip": "Layers left out",
    "speculative.method": "Who drafts",
    "speculative.adaptive": "Only where it pays",
    "speculative.model": "Draft model or head",
    "speculative.num_speculative_tokens": "Drafted tokens (k)",
    "speculative.ngram_max": "Longest n-gram",
    "speculative.ngram_min": "Shortest n-gram",
    "speculative.lookahead_window": "Lookahead window",
    "speculative.lookahead_ngram": "Lookahead n-gram",
    "speculative.synthetic_acceptance": "Synthetic acceptance",
    "speculative.max_batch": "Largest batch",
    "workload.source.prompts": "Prompts",
    "workload.source.limit": "Use the first",
    "workload.source.chat": "Chat template",
    "workload.source.num_requests": "Requests",
    "workload.source.prefix_len": "Prefix tokens",
    "workload.source.prompt_len": "Prompt tokens",
    "workload.source.suffix_len": "Tokens after the prefix",
    "workload.source.num_conversations": "Conversations",
    "workload.source.first_len": "Tokens of the first turn",
    "workload.source.turn_len": "Tokens per further turn",
    "workload.source.system_len": "System prompt tokens",
    "workload.source.think_time_s": "Think time (s)",
    "workload.source.block_len": "Tokens per block",
    "workload.source.scale": "Lengths divided by",
    "workload.source.max_prompt_len": "Longest prompt",
    "workload.source.max_output_len": "Longest answer",
    "workload.arrivals.concurrency": "In flight",
    "workload.arrivals.rate": "Requests per second",
    "workload.output_len": "Output tokens",
    "workload.sampling.n": "Samples per prompt",
    "workload.sampling.top_k": "Top k",
    "workload.sampling.top_p": "Top p",
    "workload.sampling.ignore_eos": "Ignore end of sequence",
    "workload.sampling.stop": "Stop strings",
    "workload.sampling.stop_token_ids": "Stop token ids",
    "workload.slo.preset": "Latency limits",
    "workload.slo.ttft_ms": "TTFT limit (ms)",
    "workload.slo.tpot_ms": "TPOT limit (ms)",
    "cache.layout": "KV layout",
    "cache.enable_prefix_caching": "Prefix caching",
    "workload.warmup_requests": "Warm-up requests",
    "workload.reset_prefix_cache": "Empty the prefix cache first",
}
# What an empty box stands for, where "auto" would not say it.
_EMPTY = {
    "model.revision": "none",
    "speculative.synthetic_acceptance": "none",
    "speculative.max_batch": "no limit",
    "workload.source.limit": "all",
    "workload.source.max_prompt_len": "any",
    "workload.source.max_output_len": "any",
    "workload.slo.preset": "none",
    "workload.slo.ttft_ms": "no limit",
    "workload.slo.tpot_ms": "no limit",
}
_SCALES = {"cache.cpu_bytes": 2**20}


def label_of(key: str) -> str:
    """A setting's name on the form: its own words, or the last part of its key."""
    return _LABELS.get(key) or key.rpartition(".")[2].replace("_", " ").capitalize()


def help_of(key: str) -> str:
    """What a setting trades, in one line, where the settings themselves do not say it."""
    return _HELP.get(key, "")


def empty_of(key: str) -> str:
    """What an empty box means."""
    return _EMPTY.get(key, "auto")


def _for_form(fields: Iterable[Field]) -> tuple[Field, ...]:
    return tuple(_worded(field) for field in fields)


def _worded(field: Field) -> Field:
    help_text = help_of(field.key) or field.help
    if field.kind != "int":
        return replace(field, help=help_text)
    return replace(field, help=help_text, scale=_SCALES.get(field.key, 1))


def _named(fields: Iterable[Field], *names: str) -> tuple[Field, ...]:
    by_name = {field.key.rpartition(".")[2]: field for field in fields}
    return _for_form(by_name[name] for name in names)


def _file(help_text: str) -> Field:
    """The path of a source's file; an empty box is no path, also where there must be one."""
    return replace(next(field for field in _prompts if field.key == f"{SOURCE}.file"), help=help_text)


_prompts = list(fields_of(PromptsSource, f"{SOURCE}."))
SOURCE_FIELDS: dict[str, tuple[Field, ...]] = {
    "built_in": _named(_prompts, "limit", "chat"),
    "own": _named(_prompts, "prompts", "chat"),
    "file": _named(_prompts, "file", "field", "limit", "chat"),
    "synthetic": _named(fields_of(SyntheticSource, f"{SOURCE}."), "num_requests"),
    "shared_prefix": _named(fields_of(SharedPrefixSource, f"{SOURCE}."), "groups", "prompts_per_group", "prefix_len"),
    "conversations": _named(
        fields_of(ConversationsSource, f"{SOURCE}."), "num_conversations", "system_len", "think_time_s"
    ),
    "trace": (
        _file("A path on this machine; columns TIMESTAMP, ContextTokens and GeneratedTokens."),
        *_named(fields_of(TraceSource, f"{SOURCE}."), "limit", "max_prompt_len", "max_output_len"),
    ),
    "mooncake": (
        _file("A path on this machine; timestamp, input_length, output_length and hash_ids a line."),
        *_named(
            fields_of(MooncakeSource, f"{SOURCE}."), "limit", "block_len", "scale", "max_prompt_len", "max_output_len"
        ),
    ),
}
# What must be filled in, by kind of source.
NEEDED = {"own": f"{SOURCE}.prompts", **dict.fromkeys(("file", *TRACES), f"{SOURCE}.file")}
# The lengths that a kind of source asks for besides, and all of them with their defaults.
SOURCE_LENGTHS: dict[str, tuple[str, ...]] = {
    "synthetic": (f"{SOURCE}.prompt_len",),
    "shared_prefix": (f"{SOURCE}.suffix_len",),
    "conversations": (f"{SOURCE}.turns", f"{SOURCE}.first_len", f"{SOURCE}.turn_len"),
}
_SETTINGS = {"synthetic": SyntheticSource, "shared_prefix": SharedPrefixSource, "conversations": ConversationsSource}
LENGTHS: dict[str, int] = {
    OUTPUT_LEN: Workload.model_fields["output_len"].default,
    **{
        key: _SETTINGS[source].model_fields[key.rpartition(".")[2]].default
        for source, keys in SOURCE_LENGTHS.items()
        for key in keys
    },
}
_RATE = Field("workload.arrivals.rate", "float", 4.0, help_of("workload.arrivals.rate"))
ARRIVAL_FIELDS: dict[str, tuple[Field, ...]] = {
    "closed_loop": (Field("workload.arrivals.concurrency", "int", 4, help_of("workload.arrivals.concurrency")),),
    "constant": (_RATE,),
    "poisson": (_RATE,),
    "gamma": (_RATE, *_named(fields_of(GammaRate, "workload.arrivals."), "burstiness")),
    "trace": _named(fields_of(TraceTimes, "workload.arrivals."), "speedup"),
}

CONFIG_FIELDS = _for_form(field for field in fields_of(EngineConfig) if field.key != MODEL)
SPECULATION_FIELDS = tuple(field for field in CONFIG_FIELDS if field.key.startswith("speculative."))
ENGINE_FIELDS = tuple(field for field in CONFIG_FIELDS if field not in SPECULATION_FIELDS)
SAMPLING_FIELDS = _for_form(fields_of(SamplingSettings, "workload.sampling."))
SLO_FIELDS = _for_form(fields_of(ServiceLevel, "workload.slo."))
_OF_RUN = ("workload.warmup_requests", "workload.reset_prefix_cache", "workload.seed")
RUN_FIELDS = _for_form(field for field in fields_of(Workload, "workload.") if field.key in _OF_RUN)
