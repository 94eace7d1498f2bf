"""Variants of a model as a table of figures, each with its difference from the reference. HTML, for the reason of a "–"."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import streamlit as st

from app import formatting
from app.quantization_texts import COLUMNS, value_text
from backend.experiments.quantization_config import REFERENCE, variant_name
from backend.experiments.quantization_results import MEASURES, Cell, MatrixRow, columns, matrix, wholes

_STYLE = """<style>
.sl-matrix{overflow-x:auto;font-size:.87rem;border:1px solid rgba(128,134,145,.3);border-radius:6px}
.sl-matrix table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.sl-matrix th,.sl-matrix td{padding:.38em .7em;text-align:right;white-space:nowrap;vertical-align:top;
border-bottom:1px solid rgba(128,134,145,.2)}
.sl-matrix tbody tr:last-child>*{border-bottom:0}
.sl-matrix thead th{font-weight:500;opacity:.75;cursor:help;white-space:normal;min-width:4.6em;vertical-align:bottom}
.sl-matrix th:first-child{text-align:left;font-weight:600}
.sl-matrix td small{display:block;opacity:.65;font-size:.78rem}
.sl-matrix td.best{font-weight:650;background:rgba(0,158,115,.14)}
.sl-matrix td.best small{font-weight:400}
.sl-matrix td.none{cursor:help}
.sl-matrix td.none span{opacity:.55}
.sl-matrix td.problem{text-align:left;white-space:normal;color:#D55E00}
.sl-matrix tr.reference{background:rgba(128,134,145,.1)}
</style>"""


def show(results: Sequence[Any], others: Sequence[Any] | None = None) -> None:
    """Args:
    others: results of another run, to which differences are taken instead of the reference.
    """
    st.html(matrix_html(results, others))


def matrix_html(results: Sequence[Any], others: Sequence[Any] | None = None) -> str:
    names = columns(wholes(results))
    heads = "".join(
        f'<th scope="col" title="{escape(COLUMNS[name][1])}">{escape(COLUMNS[name][0])}</th>' for name in names
    )
    base = next((row for row in wholes(results) if row["variant"] == REFERENCE), None)
    rows = "".join(_row(row, names, base) for row in matrix(results, others))
    return (
        f'{_STYLE}<div class="sl-matrix"><table><thead><tr><th scope="col">Variant</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(row: MatrixRow, names: Sequence[str], base: Any) -> str:
    name = escape(variant_name(row.variant))
    kind = ' class="reference"' if row.variant == REFERENCE else ""
    head = f'<tr{kind} data-variant="{escape(row.variant)}"><th scope="row"{_settings(row.row)}>{name}</th>'
    if row.problem:
        return f'{head}<td class="problem" colspan="{max(1, len(names))}">{escape(row.problem)}</td></tr>'
    cells = "".join(_cell(cell, name, row.row, base) for cell, name in zip(row.cells, names, strict=True))
    return f"{head}{cells}</tr>"


def _settings(row: Any) -> str:
    """What the model filled in for the variant, as a title."""
    settings = ((row.get("settings") or {}).get("quantization") or {}).items()
    known = [f"{key} = {formatting.setting(value)}" for key, value in settings if value not in (None, [])]
    return f' title="{escape(", ".join(known))}"' if known else ""


def _cell(cell: Cell, name: str, row: Any, base: Any) -> str:
    if cell.value is None:
        reason = escape(cell.reason or "Does not exist here")
        return f'<td class="none" title="{reason}"><span>{formatting.NONE}</span></td>'
    difference = "" if cell.difference is None else f"<small>{_difference(cell.difference)}</small>"
    is_marked = cell.is_best and not _is_worse(name, cell.value, None if base is None else base[name])
    best = ' class="best" title="Best of the variants, and no worse than the reference"' if is_marked else ""
    return f"<td{best}>{escape(value_text(name, row))}{difference}</td>"


def _is_worse(name: str, value: float, reference: float | None) -> bool:
    """Than the reference, which some measures do not have: those that are differences from it."""
    return reference is not None and (value < reference if MEASURES[name] == "higher" else value > reference)


def _difference(relative: float) -> str:
    return "±0 %" if abs(relative) < 0.0005 else formatting.difference(relative)
