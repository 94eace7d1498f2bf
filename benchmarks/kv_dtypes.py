"""What `cache.dtype` is worth and what it costs: blocks in the same bytes, divergence from 16 or 32 bits, tokens per second.

    python -m benchmarks.kv_dtypes TEXT [--model NAME] [--lengths 512 2048] [--threads N] [--repeats 3] [-o FILE]

- capacity: bytes a token, in closed form and as the engine's own pool has them, over those of 16 bits.
- divergence: KL of next-token distributions over the first tokens of TEXT, teacher forced, from those over a KV cache in the
  model's dtype; the heads whose keys a KV dtype breaks are named.
- speed: output tokens per second of `--requests` prompts out of TEXT at once, prefill included. Repeats of all KV dtypes are
  interleaved, so that a slow minute of the machine falls on each, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from backend.compat import configure_cpu_environment
from backend.config import DEFAULT_MODEL, EngineConfig, default_cpu_threads
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_format import KV_FORMATS
from backend.engine.engine_host import EngineHost
from backend.errors import EngineError
from backend.experiments.kv_quality import measure_model_kv_quality
from backend.metrics.environment import environment
from backend.models.sources import ensure_model
from backend.sampling_params import SamplingParams
from backend.tokenizer import load_tokenizer
from backend.workload.targets import StreamEvent


def output_rate(host: EngineHost, prompts: list[list[int]], num_tokens: int) -> float:
    """Output tokens per second of all prompts at once. Raises `EngineError` when a request ends early."""
    events: SimpleQueue[StreamEvent] = SimpleQueue()
    host.reset_prefix_cache()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        host.submit(str(index), prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), events.put)
    unfinished = len(prompts)
    while unfinished:
        event = events.get()
        if event.finish_reason not in (None, "length"):
            raise EngineError(f"request {event.request_id} ended with {event.finish_reason}")
        unfinished -= event.finish_reason is not None
    return len(prompts) * num_tokens / (time.perf_counter() - started)


def measure_speed(
    options: argparse.Namespace, token_ids: list[int], device: str
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Output tokens per second of each repeat, and the pools that the engine made, by KV dtype."""
    size = options.prompt_len
    prompts = [token_ids[index * size : (index + 1) * size] for index in range(options.requests)]
    rates: dict[str, list[float]] = {name: [] for name in KV_FORMATS}
    pools: dict[str, dict[str, int]] = {}
    host = EngineHost()
    settings: dict[str, Any] = {
        "model.name": options.model,
        "model.device": device,
        "kernels.cpu_threads": options.threads,
    }
    for _ in range(options.repeats):
        for name in KV_FORMATS:
            info = host.load(EngineConfig().with_overrides(settings | {"cache.dtype": name}))
            pools[name] = {key: info.load[key] for key in ("kv_bytes_per_token", "num_blocks", "kv_cache_bytes")}
            output_rate(host, prompts[:1], 4)  # warm-up
            rates[name].append(output_rate(host, prompts, options.output_len))
    host.close()
    return rates, pools


def capacity(group: KVGroupSpec, pools: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Bytes a token, and how many times the tokens of 16 bits the same bytes hold."""
    of_16_bits = replace(group, dtype_bytes=2).bytes_per_token
    return {
        name: {
            "bytes_per_token": (counted := replace(group, format=kv_format).bytes_per_token),
            "over_16_bits": of_16_bits / counted,
            **pools[name],
        }
        for name, kv_format in KV_FORMATS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, e.g. of WikiText-2")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--threads", type=int, default=default_cpu_threads())
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()

    configure_cpu_environment()
    import torch

    torch.set_num_threads(options.threads)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    source = ensure_model(options.model, lambda *progress: None)
    wanted = max(*options.lengths, options.requests * options.prompt_len)
    # No token has fewer than one byte, and few have more than eight.
    text = options.text.read_text(encoding="utf-8")[: 16 * wanted]
    token_ids = load_tokenizer(source).encode(text)[:wanted]
    started = time.perf_counter()
    quality, group = measure_model_kv_quality(source, token_ids, device=device, lengths=options.lengths)
    seconds = time.perf_counter() - started
    rates, pools = measure_speed(options, token_ids, device)
    result = {
        "benchmark": "kv_dtypes",
        "date": datetime.now(UTC).date().isoformat(),
        "model": options.model,
        "text": options.text.name,
        "options": {
            name: getattr(options, name)
            for name in ("lengths", "threads", "requests", "prompt_len", "output_len", "repeats")
        },
        "environment": environment(options.threads),
        "capacity": capacity(group, pools),
        "divergence": {name: [asdict(one) for one in rows] for name, rows in quality.divergences.items()},
        "divergence_seconds": seconds,
        "warnings": quality.warnings(),
        "key_heads": [asdict(head) for head in quality.heads],
        "output_tok_s": {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name, values in rates.items()
        },
    }
    print(json.dumps({key: value for key, value in result.items() if key != "key_heads"}, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
