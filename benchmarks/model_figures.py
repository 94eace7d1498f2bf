"""`ModelBenchmark`: the figures of one loaded model, and the rates they are made of."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from backend.errors import EngineError
from backend.metrics.stats import RequestStats
from backend.workload.datasets import WorkloadRequest
from benchmarks import limits as card
from benchmarks.figures import Figure, attempt
from benchmarks.idle import measure_gaps, measure_idle
from benchmarks.passes import BenchmarkEngine, random_requests
from benchmarks.peers import PEER, mix_lengths, peer_figure

WARM_UP_SHARE = 8  # a warm-up pass makes one token in so many
IdleMeasure = Callable[[BenchmarkEngine, Sequence[WorkloadRequest]], tuple[float, dict[str, float]]]
Rate = Callable[[Sequence[RequestStats]], float]
IDLE_OUTPUT_LEN = 2**20  # longer than the window, whatever the speed; the pass is cut off


def decode_rate(requests: Sequence[RequestStats]) -> float:
    """Output tokens per second while all requests decode. Raises `EngineError` where no time lies between tokens."""
    num_tokens = {request.num_output_tokens for request in requests}
    seconds = _last(requests) - max(request.emission_times[0] for request in requests)
    if len(num_tokens) > 1 or seconds <= 0:
        raise EngineError(f"requests of {sorted(num_tokens)} tokens in {seconds:.6f} s tell no decode rate")
    return len(requests) * (num_tokens.pop() - 1) / seconds


def prefill_rate(requests: Sequence[RequestStats]) -> float:
    """Input tokens per second until the last request has its first token."""
    seconds = max(request.emission_times[0] for request in requests) - _submitted(requests)
    return sum(request.num_prompt_tokens or 0 for request in requests) / seconds


def mix_rate(requests: Sequence[RequestStats]) -> float:
    """Output tokens per second from submission to the last token."""
    return sum(request.num_output_tokens for request in requests) / (_last(requests) - _submitted(requests))


def _submitted(requests: Sequence[RequestStats]) -> float:
    return min(request.arrival_time for request in requests)


def _last(requests: Sequence[RequestStats]) -> float:
    return max(request.emission_times[-1] for request in requests)


def pass_rates(
    engine: BenchmarkEngine, lengths: Sequence[tuple[int, int]], rate: Rate, recorded: Sequence[bool]
) -> list[float]:
    """The rate of each of so many passes over the same random requests, after a short one that warms up.

    Args:
        lengths: (prompt, output) tokens of each request.
        recorded: of each pass, whether it is.

    Raises `EngineError` when a pass fails, or when `model.max_model_len` cuts its requests.
    """
    vocab_size = engine.info().model["vocab_size"]
    short = [(prompt, max(1, output // WARM_UP_SHARE)) for prompt, output in lengths]
    engine.finish(random_requests(short, vocab_size), recorded=True)
    requests = random_requests(lengths, vocab_size)
    asked = sum(output for _, output in lengths)
    rates = []
    for is_recorded in recorded:
        finished = engine.finish(requests, recorded=is_recorded)
        if (made := sum(request.num_output_tokens for request in finished)) != asked:
            raise EngineError(f"{made:,} tokens came instead of {asked:,}: model.max_model_len cuts the requests")
        rates.append(rate(finished))
    return rates


class ModelBenchmark:
    """The figures of one model. One that fails is a `Figure` with the reason, and the rest goes on."""

    def __init__(
        self, model: str, engine: BenchmarkEngine, limits: card.CardLimits, gpu: str | None, options: argparse.Namespace
    ) -> None:
        self._model = model
        self._engine = engine
        self._limits = limits
        self._gpu = gpu
        self._options = options

    def figures(self) -> Iterator[Figure]:
        options = self._options
        if "decode" in options.only:
            for num_requests in options.decode_batches:
                name = f"decode {num_requests}"
                yield attempt(self._model, name, "tok/s", lambda n=num_requests, name=name: self._decode(name, n))
        if "prefill" in options.only:
            for sizes in options.prefill:
                name = f"prefill {sizes[0]}x{sizes[1]}"
                yield attempt(self._model, name, "tok/s", lambda sizes=sizes, name=name: self._prefill(name, *sizes))
        if "mix" in options.only:
            name = f"mix {options.mix_requests}"
            yield attempt(self._model, name, "tok/s", lambda: self._mix(name))
        if "idle" in options.only and self._gpu is not None:
            for num_requests in options.idle_batches:
                name = f"idle {num_requests}"
                yield attempt(self._model, name, "share", lambda n=num_requests, name=name: self._idle(name, n))
                name = f"{name}, between replays"
                yield attempt(
                    self._model, name, "share", lambda n=num_requests, name=name: self._idle(name, n, measure_gaps)
                )

    def _decode(self, name: str, num_requests: int) -> Figure:
        prompt_len, output_len = self._options.input_len, self._options.output_len
        recorded, bare = self._rates([(prompt_len, output_len)] * num_requests, decode_rate, self._options.repeats)
        info = self._engine.info()
        median = statistics.median(recorded)
        num_bytes = card.decode_bytes(
            info.model,
            getattr(torch, info.resolved_config.model.dtype).itemsize,
            info.load["kv_bytes_per_token"],
            num_requests,
            prompt_len + output_len / 2,
        )
        step_s = num_requests / median
        return self._figure(
            name,
            recorded,
            bare,
            share=num_bytes / step_s / self._limits.copy_bytes_per_s,
            limit="copy",
            details={"step_us": step_s * 1e6},
        )

    def _prefill(self, name: str, num_requests: int, prompt_len: int) -> Figure:
        recorded, bare = self._rates([(prompt_len, 1)] * num_requests, prefill_rate, self._options.repeats)
        flops_per_token = card.prefill_flops(self._engine.info().model, 1, prompt_len) / prompt_len
        median = statistics.median(recorded)
        share = median * flops_per_token / self._limits.matmul_flops_per_s
        return self._figure(name, recorded, bare, share=share, limit="matmul")

    def _mix(self, name: str) -> Figure:
        longest = self._options.mix_max_len
        lengths = [
            (min(prompt, longest), min(output, longest)) for prompt, output in mix_lengths(self._options.mix_requests)
        ]
        recorded, bare = self._rates(lengths, mix_rate, max(1, self._options.repeats - 1))
        details = {"input_tokens": sum(pair[0] for pair in lengths), "output_tokens": sum(pair[1] for pair in lengths)}
        # All tokens but the last of each go through the layers, prompts' or not.
        model = self._engine.info().model
        flops = sum(card.prefill_flops(model, 1, prompt + output - 1) for prompt, output in lengths)
        seconds = details["output_tokens"] / statistics.median(recorded)
        share = flops / seconds / self._limits.matmul_flops_per_s
        return self._figure(name, recorded, bare, share=share, limit="matmul", details=details)

    def _idle(self, name: str, num_requests: int, measure: IdleMeasure = measure_idle) -> Figure:
        lengths = [(self._options.input_len, IDLE_OUTPUT_LEN)] * num_requests
        requests = random_requests(lengths, self._engine.info().model["vocab_size"])
        share, details = measure(self._engine, requests)
        return Figure.of(self._model, name, "share", [share], details=details)

    def _figure(self, name: str, recorded: list[float], bare: list[float], **further: Any) -> Figure:
        peer = peer_figure(self._gpu, self._model, name) if self._options.protocol_is_peers else None
        return Figure.of(self._model, name, "tok/s", recorded, not_recorded=bare, peer=peer, peer_name=PEER, **further)

    def _rates(self, lengths: Sequence[tuple[int, int]], rate: Rate, repeats: int) -> tuple[list[float], list[float]]:
        """Rates of `repeats` passes with recording, and of one less without, in turns."""
        passes = [number % 2 == 0 for number in range(max(2, 2 * repeats - 1))]
        rates = pass_rates(self._engine, lengths, rate, passes)
        return rates[::2], rates[1::2]
