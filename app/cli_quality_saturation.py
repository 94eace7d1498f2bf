"""What `servelab quality --layers` says of fp8 layers beside their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from app import formatting, terminal

if TYPE_CHECKING:
    from backend.experiments.fp8_saturation import Saturation


def print_saturation(found: Sequence[Saturation], out: TextIO) -> None:
    """Layers where something saturates, and all fp8 layers together."""
    rows = [
        (
            str(each.layer),
            each.kind,
            _of(each.saturated_weights, each.num_weights),
            _of(each.saturated_activations, each.num_activations),
        )
        for each in found
        if each.saturated_weights or each.saturated_activations
    ]
    total = (
        "all",
        f"{len(found)} fp8",
        _of(sum(each.saturated_weights for each in found), sum(each.num_weights for each in found)),
        _of(sum(each.saturated_activations for each in found), sum(each.num_activations for each in found)),
    )
    terminal.print_table(("Layer", "Kind", "Saturated weights", "Saturated activations"), [*rows, total], "rlr", out)


def _of(part: int, whole: int) -> str:
    return f"{formatting.count(part)} of {formatting.count(whole)}"
