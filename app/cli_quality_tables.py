"""The tables of `servelab quality`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from app import formatting, terminal

if TYPE_CHECKING:
    from backend.experiments.layer_error import LayerError, Sensitivity
    from backend.experiments.quality import Quality
    from backend.experiments.questions import Answer
    from backend.experiments.ranges import GroupRange


def print_quality(measured: Quality, out: TextIO) -> None:
    rows = [("Perplexity", f"{measured.perplexity:,.4f}"), ("Tokens scored", formatting.count(measured.num_tokens))]
    if measured.kl is not None:
        kl = measured.kl
        rows += [
            ("Perplexity of the reference", f"{measured.reference_perplexity:,.4f}"),
            ("KL divergence, mean", _nats(kl.mean)),
            ("KL divergence, p50", _nats(kl.p50)),
            ("KL divergence, p99", _nats(kl.p99)),
            ("KL divergence, largest", _nats(kl.max)),
            ("Same first choice", formatting.percent(measured.top1_agreement)),
            ("Delta p", _with_error(measured.delta_p, measured.delta_p_standard_error)),
        ]
    terminal.print_table(("Measure", "Value"), rows, "lr", out)


def print_layers(errors: Sequence[LayerError], out: TextIO) -> None:
    rows = [
        (
            str(error.layer),
            error.kind,
            _share(error.output_error),
            _share(error.weight_error),
            f"{error.bits_per_weight:.2f}",
            ", ".join(
                f"{each.channel} ({formatting.NONE if each.ratio is None else f'{each.ratio:.1f}×'})"
                for each in error.largest_channels
            ),
        )
        for error in errors
    ]
    headers = (
        "Layer",
        "Kind",
        "Error of output",
        "of weights",
        "Bits per weight",
        "Largest channels (over the median)",
    )
    terminal.print_table(headers, rows, "rlrrrl", out)


def print_sensitivity(parts: Sequence[Sensitivity], out: TextIO) -> None:
    rows = [
        (
            part.part,
            str(part.num_layers),
            f"{part.quality.perplexity:,.4f}",
            formatting.NONE if part.quality.kl is None else _nats(part.quality.kl.mean),
            formatting.percent(part.quality.top1_agreement),
        )
        for part in parts
    ]
    headers = ("Quantized alone", "Layers", "Perplexity", "KL divergence, mean", "Same first choice")
    terminal.print_table(headers, rows, "lr", out)


def print_ranges(name: str, groups: Sequence[GroupRange], out: TextIO) -> None:
    from backend.experiments.ranges import order

    rows = [
        (
            group.group,
            formatting.number(group.max_abs),
            f"layer {group.layer}, {group.part}",
            formatting.number(group.p999),
            formatting.number(group.kurtosis),
        )
        for group in groups
    ]
    headers = (f"Values of the {name}", "Largest", "Where", "99.9 %, median layer", "Kurtosis, median layer")
    terminal.print_table(headers, rows, "lrlr", out)
    out.write(f"By their 99.9 %: {' < '.join(order(groups))}\n")


def print_answers(answers: Mapping[str, Sequence[Answer]], out: TextIO) -> None:
    """Args:
    answers: of the model and, if there is one, of the reference, to the same questions.
    """
    kinds = list(dict.fromkeys(each.question.kind for given in answers.values() for each in given))
    rows = [
        (
            kind or "all",
            *(_matches([each for each in given if kind in (each.question.kind, None)]) for given in answers.values()),
        )
        for kind in (*kinds, None)
    ]
    terminal.print_table(("Exact match", *(f"The {name}" for name in answers)), rows, "lr", out)


def _matches(answers: Sequence[Answer]) -> str:
    return f"{sum(each.is_correct for each in answers)} of {len(answers)}"


def _nats(value: float) -> str:
    return f"{value:.5f}"


def _share(value: float | None) -> str:
    return formatting.NONE if value is None else f"{value:.3%}"


def _with_error(value: float | None, error: float | None) -> str:
    """In percent, as llama.cpp shows it."""
    return f"{value:.3f} ± {formatting.NONE if error is None else f'{error:.3f}'} %"
