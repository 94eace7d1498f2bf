"""ServeLab's engine against transformers `generate` on the CPU: same weights, same threads, greedy, same output length.

    python benchmarks/vs_transformers.py [--threads N] [--repeats 5] [-o benchmarks/results/vs_transformers_cpu.json]

Rates are output tokens per second of whole requests, prefill included. Repeats of the three cases are interleaved, so that
a slow minute of the machine falls on all of them, and medians are compared. "Outside the forward" is what a step of 8
requests costs beside the model's forward and its head: scheduling, building inputs, sampling, detokenising, records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

from backend.compat import configure_cpu_environment
from backend.config import EngineConfig, default_cpu_threads
from backend.engine.engine_host import EngineHost
from backend.metrics.environment import environment
from backend.metrics.stats import StepStats
from backend.models.sources import ensure_model
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent

MODEL = "smollm2-135m"
PROMPT = "Explain in a few sentences why the sky is blue and why sunsets are red."
NUM_CONCURRENT = 8


class OurEngine:
    """The product's own host, one prompt or several at once."""

    def __init__(self, threads: int) -> None:
        self.host = EngineHost()
        settings = {"model.device": "cpu", "kernels.cpu_threads": threads, "cache.enable_prefix_caching": False}
        self.host.load(EngineConfig().with_overrides(settings))
        self.prompt = self.host.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
        self.forward_seconds = 0.0
        self.steps: list[tuple[StepStats, float]] = []
        self._time_forward()

    def _time_forward(self) -> None:
        """Wrap the model's two entry points with a clock."""
        model = self.host._require().engine.executor._runner.loaded.model  # type: ignore[attr-defined]
        for name in ("forward", "compute_logits"):
            inner = getattr(model, name)

            def timed(*args: object, inner: object = inner) -> object:
                started = time.perf_counter()
                result = inner(*args)  # type: ignore[operator]
                self.forward_seconds += time.perf_counter() - started
                return result

            setattr(model, name, timed)

    def on_step(self, stats: StepStats) -> None:
        self.steps.append((stats, self.forward_seconds))
        self.forward_seconds = 0.0

    def on_chunk(self, *chunk: object) -> None:
        """The ledger is on, as in every run; its data is not wanted here."""

    def rate(self, num_requests: int, num_tokens: int) -> tuple[float, list[int]]:
        """Output tokens per second, and the first request's ids."""
        from queue import SimpleQueue

        events: SimpleQueue[StreamEvent] = SimpleQueue()
        self.host.set_sink(self)  # type: ignore[arg-type]
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        for index in range(num_requests):
            self.host.submit(str(index), self.prompt, sampling, events.put)
        unfinished, first = num_requests, []
        while unfinished:
            event = events.get()
            unfinished -= event.finish_reason is not None
            if event.request_id == "0":
                first.extend(event.token_ids)
        return num_requests * num_tokens / (time.perf_counter() - started), first

    def outside_forward_ms(self) -> float:
        """Median over the pure decode steps of all `NUM_CONCURRENT` requests."""
        steps = [
            stats.duration_ms - forward * 1e3
            for stats, forward in self.steps
            if stats.num_decode_tokens == NUM_CONCURRENT and stats.num_prefill_tokens == 0
        ]
        return statistics.median(steps)


def transformers_rate(model: object, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    import torch

    inputs = torch.tensor([prompt])
    started = time.perf_counter()
    output = model.generate(  # type: ignore[attr-defined]
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
    )
    rate = num_tokens / (time.perf_counter() - started)
    return rate, output[0, len(prompt) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_cpu_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()

    configure_cpu_environment()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    source = ensure_model(MODEL, lambda *progress: None)
    theirs = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    # Bans an EOS before `min_new_tokens`, where ours ignores it: remove it, so that both choose among all ids.
    theirs.generation_config.eos_token_id = None
    ours = OurEngine(arguments.threads)
    cases = {
        "transformers, 1 request": lambda: transformers_rate(theirs, ours.prompt, arguments.tokens),
        "servelab, 1 request": lambda: ours.rate(1, arguments.tokens),
        f"servelab, {NUM_CONCURRENT} requests": lambda: ours.rate(NUM_CONCURRENT, arguments.tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    answers = {}
    with torch.inference_mode():
        for repeat in range(arguments.repeats + 1):  # the first is warm-up
            for name, case in cases.items():
                rate, answers[name] = case()
                if repeat:
                    rates[name].append(rate)
    ours.host.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    theirs_alone, ours_alone, ours_batched = medians.values()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": MODEL,
        "threads": arguments.threads,
        "prompt_tokens": len(ours.prompt),
        "output_tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "output_tok_s": {
            name: {"median": medians[name], "min": min(values), "max": max(values)} for name, values in rates.items()
        },
        "batch_1_over_transformers": ours_alone / theirs_alone,
        "batch_8_over_transformers_batch_1": ours_batched / theirs_alone,
        "outside_forward_ms_per_step_of_8": ours.outside_forward_ms(),
        "same_tokens": len({tuple(answer) for answer in answers.values()}) == 1,
        "environment": environment(),
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
