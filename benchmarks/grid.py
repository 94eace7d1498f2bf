"""Rows of cells, the first of them the header, as a table: for Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]
NONE = "–"


def markdown_lines(rows: Sequence[Row]) -> list[str]:
    """The first column to the left, the others to the right."""
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return [header, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *others]


def text_lines(rows: Sequence[Row], remarks: Sequence[str] = ()) -> list[str]:
    """Args:
    remarks: what to say behind each row but the header; none: nothing.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, remark in zip(rows, ["", *remarks] if remarks else [""] * len(rows), strict=True):
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip() + (f"  {remark}" if remark else ""))
    return lines
