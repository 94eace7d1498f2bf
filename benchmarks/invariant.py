"""What `kernels.batch_invariant = true` costs: decoding with it against the same sizes without, measured before."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace

from backend.config import EngineConfig
from benchmarks.figures import Figure, peer_share
from benchmarks.limits import CardLimits
from benchmarks.model_figures import ModelBenchmark
from benchmarks.passes import BenchmarkEngine
from db.session import Database

DEFAULT = "the default"


def invariant_figures(
    model: str,
    config: EngineConfig,
    database: Database,
    limits: CardLimits,
    gpu: str | None,
    options: argparse.Namespace,
    measured: Mapping[str, Figure],
) -> Iterator[Figure]:
    """Decode figures of an engine of its own, in place of the peer's those of `measured` (by name), where there are any."""
    options = argparse.Namespace(**vars(options) | {"only": ["decode"], "decode_batches": options.invariant_batches})
    engine = BenchmarkEngine(config.with_overrides({"kernels.batch_invariant": True}), database)
    try:
        for figure in ModelBenchmark(model, engine, limits, gpu, options).figures():
            default = measured.get(figure.name)
            reference = default.median if default is not None else None
            ratio = figure.median / reference if figure.median and reference else None
            yield replace(
                figure,
                name=f"{figure.name}, batch invariant",
                peer=reference,
                peer_name=DEFAULT,
                ratio=ratio,
                peer_share=peer_share(figure.share, ratio),
            )
    finally:
        engine.close()
