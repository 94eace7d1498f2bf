"""What continuous batching, paged KV and prefix caching are worth: each beside what it replaced, on the same requests.

    python -m benchmarks.baselines --trace FILE.csv [--model NAME] [--only batching,waste,prefix,no_cache] [-o FILE]

The same engine, scheduler and kernels throughout; only the setting that is named differs. Greedy, EOS ignored, random ids,
the trace's first requests all at once with their lengths cut to `--max-prompt-len` and `--max-output-len`.

- batching: `scheduler.batching` continuous and static; output tokens per second, and the share of slot-steps without a
  request, beside its closed form.
- waste: `cache.layout` paged and contiguous; the share of reserved KV slots that hold no token, and that of the pool's slots
  which no request can get (external fragmentation), over all steps.
- prefix: time to first token behind a shared system prompt, cold and warm.
- no_cache: `cache.layout` paged and none; time per output token early and late in a long answer.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from app.settings_input import engine_config
from backend.analysis.batching import compare_batching
from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.metrics.environment import environment
from backend.metrics.kv_use import KVPool, kv_use
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.metrics.stats import StepStats
from backend.workload.targets import StreamEvent
from benchmarks.passes import random_requests

KINDS = ("batching", "waste", "prefix", "no_cache")


@dataclass
class Steps:
    """A sink that keeps what each step's record and ledger say."""

    steps: list[StepStats] = field(default_factory=list)
    chunks: list[tuple[bytes, int, int]] = field(default_factory=list)

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self.chunks.append((encode(), first_step, last_step))


@dataclass(frozen=True)
class Pass:
    """One pass over some requests. Times are `time.perf_counter()` seconds, a list of them per request."""

    submitted: float
    emissions: list[list[float]]
    cached_tokens: list[int | None]
    recorded: Steps

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.emissions) - self.submitted

    @property
    def first_token_s(self) -> float:
        return min(times[0] for times in self.emissions) - self.submitted


def run(host: EngineHost, lengths: Sequence[tuple[int, int]], prompts: Sequence[Sequence[int]] | None = None) -> Pass:
    """Submit all requests at once and wait for their ends."""
    info = host.info
    assert info is not None
    requests = random_requests(lengths, info.model["vocab_size"])
    recorded, events = Steps(), SimpleQueue[StreamEvent]()
    host.set_sink(recorded)  # type: ignore[arg-type]
    submitted = time.perf_counter()
    for index, request in enumerate(requests):
        ids = list(prompts[index] if prompts else request.prompt.token_ids or ())
        host.submit(str(index), ids, request.sampling, events.put)
    emissions: list[list[float]] = [[] for _ in requests]
    cached: list[int | None] = [None] * len(requests)
    left = len(requests)
    while left:
        event = events.get()
        index = int(event.request_id)
        emissions[index] += [event.time] * len(event.token_ids)
        if event.finish_reason is not None:
            if event.finish_reason != "length":
                raise SystemExit(f"a request ended with {event.finish_reason}: {event.error}")
            cached[index] = event.num_cached_tokens
            left -= 1
    host.set_sink(None)
    return Pass(submitted, emissions, cached, recorded)


@contextmanager
def loaded(config: EngineConfig, **changes: Any) -> Iterator[EngineHost]:
    """An engine with some settings changed, `__` for the dot, after a pass that warms it up."""
    host = EngineHost()
    try:
        host.load(config.with_overrides({key.replace("__", "."): value for key, value in changes.items()}))
        run(host, [(8, 4)] * 2)
        yield host
    finally:
        host.close()


def batching(config: EngineConfig, lengths: Sequence[tuple[int, int]], options: argparse.Namespace) -> dict[str, Any]:
    slots, outputs = options.slots, [output for _, output in lengths]
    expected = compare_batching(outputs, slots)
    result: dict[str, Any] = {"slots": slots, "requests": len(lengths), "output_tokens": sum(outputs)}
    # The passes ask the same prompts again.
    settings = {"scheduler__max_num_seqs": slots, "cache__enable_prefix_caching": False}
    for name in ("continuous", "static"):
        with loaded(config, **settings, scheduler__batching=name) as host:
            passes = [run(host, lengths) for _ in range(options.repeats)]
        steps = passes[0].recorded.steps
        schedule = getattr(expected, name)
        result[name] = {
            "output_tok_s": [sum(outputs) / it.seconds for it in passes],
            "steps": len(steps),
            "idle_slot_share": 1 - sum(step.num_scheduled_requests for step in steps) / (slots * len(steps)),
            "idle_slot_share_closed_form": 1 - schedule.used_slot_steps / (slots * schedule.num_steps),
        }
    rates = [statistics.median(result[name]["output_tok_s"]) for name in ("continuous", "static")]
    result["throughput_ratio"] = rates[0] / rates[1]
    return result


def waste(config: EngineConfig, lengths: Sequence[tuple[int, int]], options: argparse.Namespace) -> dict[str, Any]:
    """Shares of all slots that were held, of the pool's for `external_share`, summed over the steps.

    Nothing is shared, so that the layouts compare.
    """
    result: dict[str, Any] = {"max_model_len": options.max_model_len}
    settings = {"model__max_model_len": options.max_model_len, "cache__enable_prefix_caching": False}
    for layout in ("paged", "contiguous"):
        with loaded(config, cache__layout=layout, **settings) as host:
            one = run(host, lengths)
            info = host.info
        assert info is not None
        block_size, num_blocks = info.resolved_config.cache.block_size, info.load["num_blocks"]
        pool = KVPool.of_run(info.resolved_config.to_dict(), info.model, num_blocks)
        history = PoolHistory(LedgerReader(one.recorded.chunks), block_size)
        uses = []
        for number in history.steps:
            moment = history.at(number)
            assert moment is not None
            scheduled = {entry.request_id: entry.num_scheduled_tokens for entry in moment.step.entries}
            uses.append(kv_use(moment.blocks, moment.num_tokens, block_size, pool, scheduled))
        slots = sum(use.num_slots for use in uses)
        result[layout] = {
            "wasted_share": sum(use.num_wasted_slots for use in uses) / slots,
            "last_blocks_share": sum(use.num_unused_slots for use in uses) / slots,
            "reserved_share": sum(use.num_reserved_slots for use in uses) / slots,
            "behind_window_share": sum(use.num_passed_slots for use in uses) / slots,
            "external_share": sum(use.num_unusable_slots for use in uses) / (num_blocks * block_size * len(uses)),
            "most_requests_at_once": max(len(use.requests) for use in uses),
            "seconds": one.seconds,
        }
    return result


def prefix(config: EngineConfig, lengths: Sequence[tuple[int, int]], options: argparse.Namespace) -> dict[str, Any]:
    """One system prompt, another question each time."""
    system_len, question_len = options.system_len, 20
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    with loaded(config) as host:
        info = host.info
        assert info is not None
        ids = random_requests([(system_len + question_len * 4 * options.repeats, 1)], info.model["vocab_size"])
        whole = list(ids[0].prompt.token_ids or ())
        system, rest = whole[:system_len], whole[system_len:]
        for number in range(4 * options.repeats):
            question = rest[number * question_len :][:question_len]
            is_cold = number % 4 == 0
            if is_cold:
                host.reset_prefix_cache()
            one = run(host, [(1, 1)], [system + question])
            seconds["cold" if is_cold else "warm"].append(one.first_token_s)
            assert bool(one.cached_tokens[0]) != is_cold
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "system_tokens": system_len,
        "question_tokens": question_len,
        "ttft_s": seconds,
        "ttft_ratio": medians["cold"] / medians["warm"],
    }


def no_cache(config: EngineConfig, lengths: Sequence[tuple[int, int]], options: argparse.Namespace) -> dict[str, Any]:
    """One request; medians of the time per token over eighths of its answer."""
    length = options.answer_len
    result: dict[str, Any] = {"output_tokens": length}
    for layout in ("paged", "none"):
        settings = {"scheduler__max_num_batched_tokens": max(512, length + 16)}
        with loaded(config, cache__layout=layout, **settings) as host:
            (times,) = run(host, [(8, length)]).emissions
        gaps = [after - before for before, after in pairwise(times)]
        eighth = len(gaps) // 8
        result[layout] = [statistics.median(gaps[n * eighth : (n + 1) * eighth]) * 1e3 for n in range(8)]
    result["unit"] = "ms per token, by eighth of the answer"
    result["growth"] = {layout: result[layout][-1] / result[layout][0] for layout in ("paged", "none")}
    return result


def read_trace(path: Path, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the first rows of an Azure LLM inference trace, cut to what was asked for."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows: Iterator[Mapping[str, str]] = islice(csv.DictReader(file), options.requests)
        return [
            (
                min(int(row["ContextTokens"]), options.max_prompt_len),
                max(1, min(int(row["GeneratedTokens"]), options.max_output_len)),
            )
            for row in rows
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.baselines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--requests", type=int, default=64, help="of the trace")
    parser.add_argument("--max-prompt-len", type=int, default=256)
    parser.add_argument("--max-output-len", type=int, default=128)
    parser.add_argument("--slots", type=int, default=8, help="requests at once, in batching")
    parser.add_argument("--max-model-len", type=int, default=2048, help="what contiguous reserves, in waste")
    parser.add_argument("--system-len", type=int, default=1500, help="tokens of the shared prompt, in prefix")
    parser.add_argument("--answer-len", type=int, default=400, help="tokens of the answer, in no_cache")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(KINDS):
        parser.error(f"--only knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    config = engine_config(None, options.set).with_overrides({"model.name": options.model})
    lengths = read_trace(options.trace, options)
    measures = {"batching": batching, "waste": waste, "prefix": prefix, "no_cache": no_cache}
    result: dict[str, Any] = {
        "benchmark": "baselines",
        "date": datetime.now(UTC).date().isoformat(),
        "trace": options.trace.name,
        "options": {key: value for key, value in vars(options).items() if key not in ("trace", "output")},
        "environment": environment(),
    }
    for kind in options.only:
        result[kind] = measures[kind](config, lengths, options)
        print(json.dumps({kind: result[kind]}, indent=1), flush=True)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
