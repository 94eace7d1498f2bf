"""A verdict on speculation in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from app import terminal
from app.certificate_texts import EXCUSED_HEADERS, excused_rows, figures

if TYPE_CHECKING:
    from backend.experiments.certificate import Verdict


def print_verdict(headers: tuple[str, str], verdict: Verdict, out: TextIO) -> None:
    """Its figures, and a line for each greedy token that differs and is excused."""
    terminal.print_table(headers, figures(verdict), "lr", out)
    if excused := excused_rows(verdict):
        out.write("\nGreedy tokens that differ and are excused:\n")
        terminal.print_table(EXCUSED_HEADERS, excused, "r", out)
