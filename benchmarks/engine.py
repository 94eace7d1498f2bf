"""The product's own engine on a GPU, through `EngineHost`, against the card's limits and a peer's figures.

    python -m benchmarks.engine [--model dummy:llama-3.1-8b ...] [--only decode,prefill,mix] [-o benchmarks/results/h100.json]

Default config, ledger, live view and recorder on; a second column shows them off. Prompts are random ids, greedy,
`ignore_eos`. Each kind of traffic runs once unmeasured; then the median of the repeats counts.

- decode b: b requests of 128 tokens in and 256 out; `b * (n_out - 1) / (t_last - t_first)`, from the last request's first
  token to the last token of all.
- prefill b x n: b prompts of n tokens, one token out: prompt tokens over the time to the last first token.
- mix: 256 requests, lengths in and out uniform in 100..1,024; output tokens over the time to the last of them. The seed is
  one whose totals are the peer's within 0.02 %.

Shares: what a step must move (weights once, KV of its context) or a prompt must compute, over what this card was measured
to do in the same call.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.metrics.environment import environment
from backend.metrics.live import LiveRun
from backend.metrics.sinks import PeakSink, SinkGroup
from backend.metrics.stats import RunEnd, RunStart, StatsSink
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.session import Database
from kernels.limits import Limits, measure_limits

PEERS = json.loads((Path(__file__).parent / "peers.json").read_text(encoding="utf-8"))
DECODE_BATCHES, DECODE_INPUT, DECODE_OUTPUT = (1, 8, 32, 128), 128, 256
PREFILLS = ((1, 2048), (16, 1024))
MIX_REQUESTS, MIX_LENGTHS, MIX_SEED = 256, (100, 1024), 1984
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Timing:
    """When a batch of requests was sent, and when each gave its first and its last token."""

    sent: float
    firsts: list[float]
    lasts: list[float]


@dataclass
class _Batch:
    """Listens to requests until all have ended."""

    left: int
    firsts: dict[str, float] = field(default_factory=dict)
    lasts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: StreamEvent) -> None:
        if event.token_ids:
            self.firsts.setdefault(event.request_id, event.time)
            self.lasts[event.request_id] = event.time
        if event.finish_reason is not None:
            self.error = self.error or event.error
            self.left -= 1
            if self.left == 0:
                self.done.set()


class Bench:
    """One model in one host; prompts are new random ids for every request."""

    def __init__(self, config: EngineConfig) -> None:
        self.host = EngineHost()
        started = time.perf_counter()
        self.info = self.host.load(config, lambda phase: None)
        self.load_seconds = time.perf_counter() - started
        self._config = config
        self._random = random.Random(0)
        self._count = 0

    def run(self, lengths: list[tuple[int, int]]) -> Timing:
        """Send requests of (prompt, output) lengths at once and wait for all."""
        vocab_size = self.info.model["vocab_size"]
        prompts = [self._random.choices(range(vocab_size), k=length) for length, _ in lengths]
        batch = _Batch(len(lengths))
        sent = time.perf_counter()
        for prompt, (_, num_out) in zip(prompts, lengths, strict=True):
            self._count += 1
            sampling = SamplingParams(max_tokens=num_out, ignore_eos=True)
            self.host.submit(f"b{self._count}", prompt, sampling, batch.on_event)
        if not batch.done.wait(TIMEOUT_S) or batch.error:
            raise SystemExit(f"requests failed: {batch.error or 'no end in time'}")
        return Timing(sent, list(batch.firsts.values()), list(batch.lasts.values()))

    @contextmanager
    def recording(self, database: Database) -> Iterator[None]:
        """What a real run has attached: peaks, database, live view, and the ledger that goes to them."""
        run_id = RunRepository(database).create(self._config.to_dict(), {})
        recorder = RunRecorder(database, run_id)
        sinks: tuple[StatsSink, ...] = (PeakSink(), recorder, LiveRun(run_id))
        group = SinkGroup(sinks)
        group.on_run_start(
            RunStart(
                time.perf_counter(), self._config.to_dict(), {}, {}, (), {"state": "cold", "num_cached_tokens": 0}, 0
            )
        )
        self.host.set_sink(group)
        try:
            yield
        finally:
            self.host.set_sink(None)
            group.on_run_end(RunEnd("finished", time.perf_counter()))
            recorder.close()


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: what is sent, how a timing becomes tokens/s, and what the card's limits would give."""

    name: str
    lengths: list[tuple[int, int]]
    kind: str  # decode | prefill | mix

    def rate(self, timing: Timing) -> float:
        if self.kind == "decode":
            tokens = len(self.lengths) * (self.lengths[0][1] - 1)
            return tokens / (max(timing.lasts) - max(timing.firsts))
        if self.kind == "prefill":
            return sum(length for length, _ in self.lengths) / (max(timing.firsts) - timing.sent)
        return sum(num_out for _, num_out in self.lengths) / (max(timing.lasts) - timing.sent)

    def possible(self, model: dict[str, Any], limits: Limits, element_bytes: int) -> float | None:
        """Tokens/s if only memory (decode) or only multiplication (prefill) took time; None for a mix of both."""
        linear = linear_parameters(model)
        if self.kind == "decode":
            context = self.lengths[0][0] + self.lengths[0][1] / 2
            kv_bytes = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"] * element_bytes
            step_bytes = linear * element_bytes + len(self.lengths) * context * kv_bytes
            return len(self.lengths) * limits.read_bytes_per_s / step_bytes
        if self.kind == "prefill":
            # The head runs for the last token of each prompt only.
            layers = linear - model["vocab_size"] * model["hidden_size"]
            length = self.lengths[0][0]
            attention = 2 * length * model["num_layers"] * model["num_heads"] * model["head_dim"]
            return limits.matmul_flops_per_s / (2 * layers + attention)
        return None


def linear_parameters(model: dict[str, Any]) -> int:
    """Weights that a token is multiplied by: all layers' products and the head."""
    heads = model["num_heads"] + 2 * model["num_kv_heads"]
    attention = model["hidden_size"] * model["head_dim"] * (heads + model["num_heads"])
    mlp = 3 * model["hidden_size"] * model["intermediate_size"]
    return model["num_layers"] * (attention + mlp) + model["vocab_size"] * model["hidden_size"]


def figures(kinds: set[str], batches: tuple[int, ...], num_out: int, mix_requests: int) -> list[Figure]:
    chosen: list[Figure] = []
    if "decode" in kinds:
        chosen += [Figure(f"decode {b}", [(DECODE_INPUT, num_out)] * b, "decode") for b in batches]
    if "prefill" in kinds:
        chosen += [Figure(f"prefill {b}x{length}", [(length, 1)] * b, "prefill") for b, length in PREFILLS]
    if "mix" in kinds:
        low, high = MIX_LENGTHS
        ins, outs = np.random.default_rng(MIX_SEED).integers(low, high + 1, (2, 256))[:, :mix_requests].tolist()
        chosen.append(Figure(f"mix {mix_requests}", list(zip(ins, outs, strict=True)), "mix"))
    return chosen


def measure(bench: Bench, figure: Figure, repeats: int, limits: Limits, database: Database, peer: float | None) -> dict:
    """Both columns of one figure: recording on, which counts, and off. Repeats are interleaved."""
    bench.run(figure.lengths)
    recorded, plain = [], []
    for _ in range(repeats):
        with bench.recording(database):
            recorded.append(figure.rate(bench.run(figure.lengths)))
        plain.append(figure.rate(bench.run(figure.lengths)))
    rate = statistics.median(recorded)
    possible = figure.possible(dict(bench.info.model), limits, 4 if limits.dtype == "float32" else 2)
    return {
        "name": figure.name,
        "kind": figure.kind,
        "tok_per_s": rate,
        "min": min(recorded),
        "max": max(recorded),
        "samples": recorded,
        "not_recorded_tok_per_s": statistics.median(plain),
        "step_us": len(figure.lengths) / rate * 1e6 if figure.kind == "decode" else None,
        "peer_tok_per_s": peer,
        "over_peer": rate / peer if peer else None,
        "share_of_limit": rate / possible if possible else None,
    }


def line(row: dict[str, Any]) -> str:
    over = f"{row['over_peer']:.2f}x" if row["over_peer"] else "-"
    share = f"{row['share_of_limit']:.0%}" if row["share_of_limit"] else "-"
    step = f"{row['step_us']:,.0f} us" if row["step_us"] else "-"
    return (
        f"{row['name']:16} {row['tok_per_s']:12,.0f} tok/s  ({row['min']:,.0f}..{row['max']:,.0f})  step {step:>10}  "
        f"over peer {over:>6}  of limit {share:>4}  not recorded {row['not_recorded_tok_per_s']:,.0f}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="repeatable; default: the 8B and the SmolLM2 shape")
    parser.add_argument("--only", default="decode,prefill,mix", help="of decode, prefill, mix")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config override, as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--decode-batches", default=",".join(map(str, DECODE_BATCHES)))
    parser.add_argument("--output-len", type=int, default=DECODE_OUTPUT)
    parser.add_argument("--mix-requests", type=int, default=MIX_REQUESTS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    kinds = set(options.only.split(","))
    if unknown := kinds - {"decode", "prefill", "mix"}:
        parser.error(f"unknown kind {', '.join(sorted(unknown))}; known are decode, prefill, mix")
    overrides = {key: _value(value) for key, _, value in (item.partition("=") for item in options.set)}
    batches = tuple(int(batch) for batch in options.decode_batches.split(","))

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = measure_limits(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(
        f"{limits.device}: reads {limits.read_bytes_per_s / 1e12:.2f} TB/s, multiplies {limits.matmul_flops_per_s / 1e12:.0f} "
        f"TFLOP/s in {limits.dtype}"
    )
    peers = next((peers for card, peers in PEERS["cards"].items() if card in limits.device), {})
    models = []
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/servelab.db")
        for name in options.model or ["dummy:llama-3.1-8b", "dummy:smollm2-135m"]:
            config = EngineConfig().with_overrides({"model.name": name} | overrides)
            bench = Bench(config)
            print(f"{name}, loaded in {bench.load_seconds:.1f} s", flush=True)
            rows = []
            for figure in figures(kinds, batches, options.output_len, options.mix_requests):
                peer = peers.get(name, {}).get(figure.name)
                rows.append(measure(bench, figure, options.repeats, limits, database, peer))
                print(line(rows[-1]), flush=True)
            resolved = bench.info.resolved_config.to_dict()
            models.append({"model": name, "load_seconds": bench.load_seconds, "config": resolved, "figures": rows})
            bench.host.close()
        database.close()
    if options.output:
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "card": limits.device,
            "limits": {
                "read_tb_per_s": limits.read_bytes_per_s / 1e12,
                "matmul_tflop_per_s": limits.matmul_flops_per_s / 1e12,
                "dtype": limits.dtype,
            },
            "peer": PEERS["peer"] if peers else None,
            "protocol": PEERS["protocol"],
            "repeats": options.repeats,
            "models": models,
            "environment": environment(),
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(options.output, file=sys.stderr)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
