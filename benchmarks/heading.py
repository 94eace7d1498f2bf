"""What every result of a card begins with, and the line that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from backend.metrics.environment import environment

if TYPE_CHECKING:
    from benchmarks.limits import CardLimits


def heading(benchmark: str, gpu: str | None, limits: CardLimits | None, commit: str | None) -> dict[str, Any]:
    """Args:
    gpu: the card's name; None on a CPU.
    limits: None where nothing is held against them.
    commit: to state where this is no checkout.
    """
    machine = environment()
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or machine["commit"],
        "card": gpu,
        "driver": machine["gpu_driver"],
        "limits": asdict(limits) if limits else None,
        "environment": machine,
    }


def machine_line(result: Mapping[str, Any]) -> str:
    """Card, versions, date, commit and, where they were measured, limits of a stored result."""
    versions = result["environment"]["versions"]
    limits = result["limits"]
    parts = [
        result["card"] or result["environment"]["cpu"] or "CPU",
        f"driver {result['driver']}" if result["driver"] else None,
        f"torch {versions['torch']}",
        f"triton {versions['triton']}" if versions["triton"] else None,
        result["date"],
        f"commit {result['commit'][:7]}" if result["commit"] else None,
        f"copies {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s" if limits else None,
        f"multiplies {limits['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s" if limits else None,
    ]
    return ", ".join(part for part in parts if part)
