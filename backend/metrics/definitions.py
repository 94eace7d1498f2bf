"""Every figure of a run in words: label, unit, formula and where the clock is read. Shown beside the numbers."""

from __future__ import annotations

from typing import NamedTuple


class MetricDefinition(NamedTuple):
    label: str
    unit: str  # "" for a plain count; "%" for a fraction, stored as 0…1
    formula: str


_FINISHED = "Finished requests only, warm-up left out."
_CLOCK = "Clock: time.perf_counter() in this process, read when the step that computed a token is back from the device."

DEFINITIONS: dict[str, MetricDefinition] = {
    "num_requests": MetricDefinition(
        "Requests",
        "",
        "Measured requests sent, however they ended; each sample of a prompt is one. Warm-up requests are left out.",
    ),
    "num_failed": MetricDefinition(
        "Failed requests",
        "",
        "Measured requests refused or ended by an error. They stretch the duration and enter no other figure.",
    ),
    "duration_s": MetricDefinition(
        "Duration", "s", f"Last delivery or end − first arrival, over the measured requests. {_CLOCK}"
    ),
    "input_tokens": MetricDefinition(
        "Input tokens",
        "tok",
        f"Σ prompt tokens, chat template included; a prompt with several samples counts once. {_FINISHED}",
    ),
    "output_tokens": MetricDefinition(
        "Output tokens",
        "tok",
        "Σ tokens delivered, counted by id and not by re-tokenising the text; a final end-of-sequence or stop token is "
        f"not delivered. {_FINISHED}",
    ),
    "output_throughput_tok_s": MetricDefinition(
        "Output throughput", "tok/s", "Output tokens / duration; input tokens are not in it."
    ),
    "total_throughput_tok_s": MetricDefinition(
        "Total throughput", "tok/s", "(Input tokens + output tokens) / duration."
    ),
    "request_throughput_req_s": MetricDefinition("Request throughput", "req/s", "Finished requests / duration."),
    "goodput_req_s": MetricDefinition(
        "Goodput",
        "req/s",
        "Finished requests that meet every limit set (TTFT ≤ limit, TPOT ≤ limit) / duration; nothing without limits. "
        "A request that has no TPOT, such as one of a single token, cannot meet a TPOT limit.",
    ),
    "ttft_ms": MetricDefinition(
        "Time to first token (TTFT)",
        "ms",
        "t(first delivery) − t(arrival) per request, which is queue + prefill. The arrival is the moment the workload "
        "planned, so waiting counts wherever it happens; each sample of a prompt has its own first token. "
        f"{_FINISHED} {_CLOCK}",
    ),
    "ttft_ms_by_priority": MetricDefinition(
        "TTFT by priority",
        "ms",
        "The time to first token of the requests of each priority number; nothing where all have the same.",
    ),
    "queue_ms": MetricDefinition(
        "Queue", "ms", f"t(start of the first step that ran any of its tokens) − t(arrival) per request. {_CLOCK}"
    ),
    "prefill_ms": MetricDefinition(
        "Prefill",
        "ms",
        f"t(first delivery) − t(start of the first step that ran any of its tokens) per request. {_CLOCK}",
    ),
    "tpot_ms": MetricDefinition(
        "Time per output token (TPOT)",
        "ms",
        "(t(last delivery) − t(first delivery)) / (output tokens − 1) per request, each request weighing the same; "
        f"none for one token or one delivery. {_FINISHED} {_CLOCK}",
    ),
    "itl_ms": MetricDefinition(
        "Inter-token latency (ITL)",
        "ms",
        "Gaps between a request's deliveries, pooled over all requests; a delivery of several tokens is one gap. "
        f"{_FINISHED} {_CLOCK}",
    ),
    "e2el_ms": MetricDefinition(
        "End-to-end latency (E2EL)", "ms", f"t(last delivery) − t(arrival) per request. {_FINISHED} {_CLOCK}"
    ),
    "kv_cache_usage_max": MetricDefinition(
        "Peak KV usage",
        "%",
        "Max over measured steps of referenced / usable blocks, 0…1, as the pool stands after the step.",
    ),
    "preemptions": MetricDefinition(
        "Preemptions",
        "",
        "Σ times a measured request had to give up its KV blocks, and was computed again or came back from host memory.",
    ),
    "preemptions_swapped": MetricDefinition(
        "Preempted by swapping",
        "",
        "Σ over measured steps of the preempted requests whose KV went to host memory; the others were computed again. "
        "Nothing where none was swapped.",
    ),
    "swapped_out_bytes": MetricDefinition(
        "Swapped out",
        "bytes",
        "Σ over measured steps of the KV copied to host memory, in whole blocks; what was there already is not copied.",
    ),
    "swapped_in_bytes": MetricDefinition(
        "Swapped in",
        "bytes",
        "Σ over measured steps of the KV copied back, in whole blocks; what the prefix cache still had is not copied.",
    ),
    "prefix_cache_hit_rate": MetricDefinition(
        "Prefix cache hit rate",
        "%",
        "Prompt tokens found in the cache / prompt tokens looked up, counted once per request; nothing while prefix "
        "caching is off.",
    ),
    "draft_acceptance_rate": MetricDefinition(
        "Draft acceptance rate",
        "%",
        "Accepted / drafted tokens, of draft trees one of each depth that a round came to; nothing without speculation.",
    ),
    "mean_acceptance_length": MetricDefinition(
        "Mean acceptance length",
        "tok",
        "1 + accepted tokens / rounds; nothing without speculation. Accepted tokens are those delivered. The 1 is the token "
        "that the model itself adds to each round, recovered or bonus. It counts even where a stop token or stop text ends a "
        "request before it: at most once a request.",
    ),
    "peak_memory_bytes": MetricDefinition(
        "Peak memory",
        "bytes",
        "The most device memory this process had allocated, or its resident set on the CPU: the larger of the engine's "
        "own peak and the samples taken once a second.",
    ),
}
