"""The product's own engine on the card: decode, prefill, a mix, start, idle share, batch invariance, long contexts, open pages.

    python -m benchmarks.engine [--model NAME ...] [--only decode,mix] [--set KEY=VALUE ...] [-o FILE]

The default configuration, driven through `EngineHost` as a run is: ledger, recorder and live view on; the same without any
sink beside it, in turns. Greedy, EOS ignored, random ids, all requests at once; a warm-up pass of each kind is left out.
Times are those of the deliveries: decode counts b * (n_out - 1) tokens from the last first token to the last token,
prefill all input tokens from submission to the last first token, the mix all output tokens from submission to the last.
Idle share, the cost of batch invariance, the long-context figures and the dashboard's share are what `benchmarks/idle.py`,
`benchmarks/invariant.py`, `benchmarks/long_context.py` and `benchmarks/dashboard.py` say. A figure above what the card reads
or multiplies is none, and the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from app.settings_input import engine_config
from backend.compat import configure_cpu_environment
from backend.config import EngineConfig
from benchmarks.figures import Figure
from benchmarks.heading import heading
from benchmarks.invariant import invariant_figures
from benchmarks.limits import believable, measure_limits
from benchmarks.long_context import attention_figures
from benchmarks.model_figures import ModelBenchmark
from benchmarks.options import numbers, sizes
from benchmarks.passes import BenchmarkEngine
from benchmarks.peers import MIX_MAX_LEN, MIX_REQUESTS, PEER
from benchmarks.start import first_token_time, start_figures
from benchmarks.table import text_table
from db.session import Database

MODELS = ("dummy:llama-3.1-8b", "dummy:smollm2-135m")
KINDS = ("decode", "prefill", "mix", "start", "idle", "invariant", "attention", "dashboard")
DEFAULT_KINDS = KINDS[:-1]  # the dashboard's takes two minutes, as its passes must last for seconds


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for, as plain data."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    figures: list[Figure] = []

    def add(figure: Figure) -> None:
        figures.append(figure)
        value = figure.error if figure.median is None else f"{figure.median:,.3f} {figure.unit}"
        print(f"{figure.model}, {figure.name}: {value}", file=sys.stderr, flush=True)

    if "start" in options.only and gpu is not None:  # first: the new processes want the memory that is used later
        for model in options.model:
            for figure in start_figures(model, options.set, gpu):
                add(figure)
    if "dashboard" in options.only:
        from benchmarks.dashboard import dashboard_figures  # it imports Streamlit, which the others should not share

        for model in options.model:
            for figure in dashboard_figures(model, _config(model, options.set), options):
                add(figure)
    limits = measure_limits(device)
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/servelab.db")
        for model in options.model if {"decode", "prefill", "mix", "idle"} & set(options.only) else ():
            config = _config(model, options.set)
            engine = BenchmarkEngine(config, database)
            try:
                for figure in ModelBenchmark(model, engine, limits, gpu, options).figures():
                    add(figure)
                models[model] = model_info(engine, config)
            finally:
                engine.close()
        for model in options.model if "invariant" in options.only else ():
            measured = {figure.name: figure for figure in figures if figure.model == model}
            for figure in invariant_figures(
                model, _config(model, options.set), database, limits, gpu, options, measured
            ):
                add(figure)
        database.close()
    if "attention" in options.only and gpu is not None:
        for figure in attention_figures(device, limits):
            add(figure)
    figures, implausible = believable(figures, limits)
    return heading("engine", gpu, limits, options.commit) | {
        "peer": PEER,
        "options": {name: value for name, value in vars(options).items() if name not in ("output", "start_only")},
        "models": models,
        "figures": [asdict(figure) for figure in figures],
        "implausible": implausible,
    }


def model_info(engine: BenchmarkEngine, config: EngineConfig) -> dict[str, Any]:
    """What was asked for and what was loaded, or why not."""
    try:
        info = engine.info()
    except Exception as error:
        return {"config": config.to_dict(), "error": str(error)}
    return {
        "config": config.to_dict(),
        "resolved_config": info.resolved_config.to_dict(),
        "load": dict(info.load),
        "notices": list(info.notices),
    }


def _config(model: str, settings: Sequence[str]) -> EngineConfig:
    # Every pass asks the same prompts again: what one computes must not be there for the next.
    return engine_config(None, settings).with_overrides({"model.name": model, "cache.enable_prefix_caching": False})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help=f"repeatable; default: {' and '.join(MODELS)}")
    parser.add_argument(
        "--only", type=_kinds, default=list(DEFAULT_KINDS), help=f"of {','.join(KINDS)}; default: all but the last"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument(
        "--repeats", type=int, default=3, help="with recording; one less without, and for the mix and the dashboard"
    )
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt in decode and idle")
    parser.add_argument("--output-len", type=int, default=256, help="tokens that decode makes, two at least")
    parser.add_argument("--decode-batches", type=numbers, default=[1, 8, 32, 128], help="requests at once")
    parser.add_argument("--prefill", type=sizes, default=[[1, 2048], [16, 1024]], help="REQUESTSxTOKENS,...")
    parser.add_argument("--mix-requests", type=int, default=MIX_REQUESTS)
    parser.add_argument("--mix-max-len", type=int, default=MIX_MAX_LEN, help="longer prompts and outputs are cut to it")
    parser.add_argument("--idle-batches", type=numbers, default=[1, 8, 32, 128, 256], help="requests at once")
    parser.add_argument("--invariant-batches", type=numbers, default=[1, 32], help="requests at once")
    parser.add_argument("--dashboard-batches", type=numbers, default=[1, 32, 128], help="requests at once")
    parser.add_argument("--dashboard-clients", type=int, default=1, help="browsers on the Run page")
    parser.add_argument("--commit", help="to state where this is no checkout")
    parser.add_argument("--start-only", metavar="MODEL", help="load it, make a token, print when it came, and end")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.output_len < 2:
        parser.error("--repeats must be 1 or more and --output-len 2 or more")
    if options.dashboard_clients < 1:
        parser.error("--dashboard-clients must be 1 or more")
    options.model = options.model or list(MODELS)
    defaults = {name: parser.get_default(name) for name in ("input_len", "output_len", "mix_max_len")}
    options.protocol_is_peers = all(getattr(options, name) == value for name, value in defaults.items())
    return options


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return kinds


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    configure_cpu_environment()
    if options.start_only:
        print(first_token_time(_config(options.start_only, options.set)))
        return
    result = run(options)
    print(text_table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["implausible"]:
        sys.exit("\n".join(f"error: {problem}" for problem in result["implausible"]))


if __name__ == "__main__":
    main()
