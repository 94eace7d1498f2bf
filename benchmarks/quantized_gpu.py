"""What weights in fewer bits are worth on the card: tokens per second beside the model as it is, and what of them is read.

    python -m benchmarks.quantized_gpu [--model NAME] [--variant METHOD[:OPTION=VALUE,...] ...] [--seconds S] [-o FILE]

The default configuration, driven and recorded as in `benchmarks/engine.py`, whose passes, prompts and rates these are; a model
for each variant, one after the other, the one as it is first. Ratios are to that. The share of a decode is that of the variant's
own floor: reading its layers and head once, in the bytes that the model reports, at the speed of a copy measured in the same
call; keys and values are left out of it. What tensors torch then holds on the card stands beside the bytes reported. A
variant that computes by a reference instead of a kernel has no speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from backend.compat import configure_cpu_environment
from backend.config import EngineConfig
from backend.engine.loading import EngineInfo
from backend.errors import ServeLabError
from backend.experiments.quantization_config import REFERENCE, parse_variant, variant_name
from backend.worker.model_runner import ModelRunner
from benchmarks.aims import LARGE
from benchmarks.figures import Figure, attempt, peer_share
from benchmarks.heading import heading
from benchmarks.limits import CardLimits, believable, layer_and_head_bytes, measure_limits
from benchmarks.model_figures import decode_rate, pass_rates, prefill_rate
from benchmarks.options import numbers, sizes
from benchmarks.passes import BenchmarkEngine
from benchmarks.peers import PEER, peer_figure
from benchmarks.quantized_table import text_table
from db.session import Database

VARIANTS = (
    "int4:group_size=128,zero_point=none",
    "int4:group_size=128,zero_point=integer",
    "int8",
    "nf4",
    "fp8",
    "w8a8_int8",
)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for, as plain data."""
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    limits = measure_limits(device)
    rows: list[dict[str, Any]] = []
    implausible: list[str] = []
    reference: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/servelab.db")
        for variant in (REFERENCE, *options.variant):
            if time.perf_counter() - started > options.seconds:
                rows.append({"variant": variant, "error": f"left out: {options.seconds:g} s were over"})
                continue
            row, figures = measure_variant(variant, database, limits, reference, options)
            figures, lines = believable(figures, limits)
            implausible += lines
            if variant == REFERENCE:
                reference = {figure.name: figure.median for figure in figures if figure.median is not None}
            card = gpu if options.protocol_is_peers else None
            peer = f"{options.model}, {variant}"
            over_peer = [_over(figure, peer_figure(card, peer, figure.name)) for figure in figures]
            row["figures"] = [asdict(figure) for figure in figures]
            row["over_peer"] = [asdict(figure) for figure in over_peer if figure is not None]
            rows.append(row)
            _say(row)
        database.close()
    return heading("quantized_gpu", gpu, limits, options.commit) | {
        "peer": PEER,
        "model": options.model,
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "results": rows,
        "implausible": implausible,
    }


def measure_variant(
    variant: str, database: Database, limits: CardLimits, reference: Mapping[str, float], options: argparse.Namespace
) -> tuple[dict[str, Any], list[Figure]]:
    """What was loaded, and how fast it is; an `error` in place of both where it cannot be loaded.

    Args:
        reference: tokens per second of the model as it is, by figure.
    """
    config = EngineConfig() if variant == REFERENCE else parse_variant(variant).engine_config(options.model)
    # Every pass asks the same prompts again: what one computes must not be there for the next.
    config = config.with_overrides({"model.name": options.model, "cache.enable_prefix_caching": False})
    engine = BenchmarkEngine(config, database)
    try:
        with weights_on_card() as held:
            info = engine.info()
        row = _loaded(variant, info, held)
        if info.load["emulated_quantization"]:
            return row, []
        return row, list(_figures(variant, engine, row["floor_bytes"], limits, reference, options))
    except ServeLabError as error:
        return {"variant": variant, "error": str(error)}, []
    finally:
        engine.close()


@contextmanager
def weights_on_card() -> Iterator[list[int]]:
    """By how many bytes torch's tensors on the card grow when a model's weights are loaded within, for each that is.

    Of the bytes that were asked for: how an allocator rounds them up depends on what it had to hold before.
    """
    held: list[int] = []
    load_model = ModelRunner.load_model

    def num_bytes() -> int:
        return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # none without a card

    def counted(runner: ModelRunner, *arguments: Any) -> Any:
        before = num_bytes()
        loaded = load_model(runner, *arguments)
        gc.collect()  # what only a cycle keeps is not held
        held.append(num_bytes() - before)
        return loaded

    with patch.object(ModelRunner, "load_model", counted):
        yield held


def _loaded(variant: str, info: EngineInfo, held: Sequence[int]) -> dict[str, Any]:
    dtype, weights_bytes = info.resolved_config.model.dtype, info.load["weights_bytes"]
    names = ("total_seconds", "weights_bytes", "kv_cache_bytes", "num_quantized_layers", "emulated_quantization")
    return {
        "variant": variant,
        "dtype": dtype,
        **{name: info.load[name] for name in names},
        "floor_bytes": layer_and_head_bytes(info.model, getattr(torch, dtype).itemsize, weights_bytes),
        "device_weights_bytes": held[-1] if info.resolved_config.model.device == "cuda" else None,
    }


def _figures(
    variant: str,
    engine: BenchmarkEngine,
    floor_bytes: int,
    limits: CardLimits,
    reference: Mapping[str, float],
    options: argparse.Namespace,
) -> Iterator[Figure]:
    def figure(name: str, lengths: Sequence[tuple[int, int]], is_decode: bool) -> Figure:
        rates = pass_rates(engine, lengths, decode_rate if is_decode else prefill_rate, [True] * options.repeats)
        steps_per_s = statistics.median(rates) / len(lengths)
        return Figure.of(
            variant,
            name,
            "tok/s",
            rates,
            peer=reference.get(name),
            peer_name=REFERENCE,
            share=floor_bytes * steps_per_s / limits.copy_bytes_per_s if is_decode else None,
            limit="copy" if is_decode else None,
        )

    kinds = [(f"decode {number}", number, options.input_len, options.output_len) for number in options.decode_batches]
    kinds += [(f"prefill {number}x{length}", number, length, 1) for number, length in options.prefill]
    for name, number, prompt_len, output_len in kinds:
        lengths = [(prompt_len, output_len)] * number
        yield attempt(
            variant,
            name,
            "tok/s",
            lambda name=name, lengths=lengths: figure(name, lengths, name.startswith("decode")),
        )


def _over(figure: Figure, peer: float | None) -> Figure | None:
    """The same figure beside the peer's, where there are both."""
    if figure.median is None or peer is None:
        return None
    ratio = figure.median / peer
    return replace(figure, peer=peer, peer_name=PEER, ratio=ratio, peer_share=peer_share(figure.share, ratio))


def _say(row: Mapping[str, Any]) -> None:
    speeds = [f"{figure['name']} {figure['median'] or 0:,.0f}" for figure in row["figures"]]
    said = row.get("error") or ", ".join(speeds) or "emulated"
    print(f"{variant_name(row['variant'])}: {said}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=LARGE)
    parser.add_argument("--variant", action="append", help=f"repeatable; default: {' '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=2, help="passes of each figure, whose median it is")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt in decode")
    parser.add_argument("--output-len", type=int, default=256, help="tokens that decode makes, two at least")
    parser.add_argument("--decode-batches", type=numbers, default=[1, 8, 64], help="requests at once")
    parser.add_argument("--prefill", type=sizes, default=[[8, 1024], [16, 1024]], help="REQUESTSxTOKENS,...")
    parser.add_argument("--seconds", type=float, default=150.0, help="no variant begins after so many")
    parser.add_argument("--commit", help="to state where this is no checkout")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.output_len < 2:
        parser.error("--repeats must be 1 or more and --output-len 2 or more")
    options.variant = options.variant or list(VARIANTS)
    options.protocol_is_peers = all(
        getattr(options, name) == parser.get_default(name) for name in ("input_len", "output_len")
    )
    try:
        for variant in options.variant:
            parse_variant(variant)
    except ServeLabError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    configure_cpu_environment()
    result = run(options)
    print(text_table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["implausible"]:
        sys.exit("\n".join(f"error: {problem}" for problem in result["implausible"]))


if __name__ == "__main__":
    main()
