"""What weights in fewer bits are worth on a CPU: tokens per second through the engine beside fp32, and products alone.

    python -m benchmarks.quantized_cpu [--model NAME] [--threads 1 2] [--repeats 3] [-o FILE]

- decode: output tokens per second of 1 and of 8 requests at once, from the moment when all have their first token.
- prefill: prompt tokens per second until the first output token of one request.
- products: milliseconds of a decoder layer's linear layers, by tokens at once.

Every variant is measured once a repeat, one after the other, so that a slow minute of the machine falls on each; its shares of
fp32 are of the same repeat. A variant that computes by a reference instead of a kernel gets no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from backend.compat import configure_cpu_environment
from backend.config import DEFAULT_MODEL, EngineConfig, default_cpu_threads
from backend.engine.engine_host import EngineHost
from backend.errors import EngineError
from backend.metrics.environment import environment
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent

DENSE = "float32"
VARIANTS: dict[str, dict[str, Any]] = {
    DENSE: {},
    "int8": {"quantization.method": "int8"},
    "w8a8_int8": {"quantization.method": "w8a8_int8"},
    "w8a8_int8, head int8": {"quantization.method": "w8a8_int8", "quantization.head": "int8"},
    "int4": {"quantization.method": "int4"},
    "int4, head int8": {"quantization.method": "int4", "quantization.head": "int8"},
}
PRODUCT_TOKENS = (1, 2, 4, 8, 16, 64, 256)


def finish(host: EngineHost, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """Seconds until all prompts, sent at once, have their first token, and from there to their last one.

    Raises `EngineError` when a request ends early.
    """
    events: SimpleQueue[tuple[float, StreamEvent]] = SimpleQueue()
    host.reset_prefix_cache()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        host.submit(str(index), prompt, sampling, lambda event: events.put((time.perf_counter(), event)))
    first: dict[str, float] = {}
    unfinished, last = len(prompts), started
    while unfinished:
        last, event = events.get()
        if event.finish_reason not in (None, "length"):
            raise EngineError(f"request {event.request_id} ended with {event.finish_reason}")
        if event.token_ids:
            first.setdefault(event.request_id, last)
        unfinished -= event.finish_reason is not None
    return max(first.values()) - started, last - max(first.values())


def measure(host: EngineHost, options: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    """Tokens per second of one repeat."""
    generator = np.random.default_rng(0)

    def prompts(number: int, length: int) -> list[list[int]]:
        return generator.integers(0, vocab_size, (number, length)).tolist()

    rates = {}
    for requests in options.requests:
        _, seconds = finish(host, prompts(requests, 8), options.output_len)
        rates[f"decode_{requests}_tok_s"] = requests * (options.output_len - 1) / seconds
    seconds, _ = finish(host, prompts(1, options.prompt_len), 1)
    return rates | {"prefill_tok_s": options.prompt_len / seconds}


def measure_engine(options: argparse.Namespace, threads: int) -> dict[str, dict[str, Any]]:
    """By variant: what was loaded, and tokens per second with their shares of fp32's."""
    hosts: dict[str, EngineHost] = {}
    result: dict[str, dict[str, Any]] = {}
    settings = {"model.name": options.model, "model.device": "cpu", "kernels.cpu_threads": threads}
    settings |= {"model.dtype": "float32", "cache.num_blocks": 256}
    vocab_size = 0
    try:
        for name, changes in VARIANTS.items():
            host = hosts[name] = EngineHost()
            info = host.load(EngineConfig().with_overrides(settings | changes))
            result[name] = {key: info.load[key] for key in ("weights_bytes", "total_seconds", "emulated_quantization")}
            vocab_size = info.model["vocab_size"]
            if info.load["emulated_quantization"]:
                hosts.pop(name).close()
            else:
                finish(host, [[1, 2, 3]], 3)  # warm-up
        repeats = [
            {name: measure(host, options, vocab_size) for name, host in hosts.items()} for _ in range(options.repeats)
        ]
    finally:
        for host in hosts.values():
            host.close()
    for name in hosts:
        for rate in repeats[0][name]:
            result[name][rate] = spread(repeat[name][rate] for repeat in repeats) | {
                "over_float32": spread(repeat[name][rate] / repeat[DENSE][rate] for repeat in repeats)
            }
    return result


def measure_products(repeats: int) -> dict[str, dict[int, dict[str, float]]]:
    """By variant and tokens: milliseconds of the default model's layer, four products; weights are random."""
    import torch

    from backend.layers.linear import Linear
    from backend.layers.quantized_linear import QuantizedLinear
    from backend.quantization.int4 import Int4
    from backend.quantization.int8 import Int8
    from backend.quantization.w8a8_int8 import W8A8Int8

    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # outputs, inputs
    methods = {"int8": Int8(), "w8a8_int8": W8A8Int8(), "int4": Int4(4, 64, "float")}
    layers: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {name: [] for name in (DENSE, *methods)}
    for rows, columns in shapes:
        weight = torch.randn(rows, columns) * columns**-0.5
        dense = Linear(columns, rows, bias=False, dtype=torch.float32, device=torch.device("cpu"))
        assert dense.weight is not None
        dense.weight.data.copy_(weight)
        dense.prepare()
        layers[DENSE].append(dense)
        for name, method in methods.items():
            packed = method.quantize(weight).prepare()
            if not packed.emulated:
                layers[name].append(QuantizedLinear(packed, None))

    result: dict[str, dict[int, dict[str, float]]] = {name: {} for name in layers if layers[name]}
    for num_tokens in PRODUCT_TOKENS:
        inputs = [torch.randn(num_tokens, columns) for _, columns in shapes]
        times: dict[str, list[float]] = {name: [] for name in result}
        for repeat in range(repeats + 1):
            for name in result:
                started = time.perf_counter()
                for _ in range(rounds := max(1, 64 // num_tokens)):
                    for layer, x in zip(layers[name], inputs, strict=True):
                        layer(x)
                if repeat:  # the first warms up
                    times[name].append((time.perf_counter() - started) / rounds * 1e3)
        for name, values in times.items():
            result[name][num_tokens] = spread(values)
    return result


def spread(values: Iterable[float]) -> dict[str, Any]:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, default_cpu_threads() + 1}))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=512, help="of the prefill")
    parser.add_argument("--output-len", type=int, default=32, help="of each decoding request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()

    configure_cpu_environment()
    import torch

    by_threads: dict[int, dict[str, Any]] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            products = measure_products(4 * options.repeats)
        by_threads[threads] = {"engine": measure_engine(options, threads), "products_ms": products}
    result = {
        "benchmark": "quantized_cpu",
        "date": datetime.now(UTC).date().isoformat(),
        "model": options.model,
        "options": {
            name: getattr(options, name) for name in ("threads", "requests", "prompt_len", "output_len", "repeats")
        },
        "environment": environment(max(options.threads)),
        "by_threads": by_threads,
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
