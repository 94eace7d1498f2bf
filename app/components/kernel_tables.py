"""A kernel run's tables: its timings, and the checks of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting

SHORT_TABLE = 16  # rows that are shown without scrolling

_TIMED = {"launch": "kernel", "reference": "reference"}


def timings(timed: Sequence[Any]) -> None:
    """Args:
    timed: of `backend.experiments.kernel_results.timings`.
    """
    has_both = len({row["implementation"] for row in timed}) > 1
    rows = [
        {
            "Op": row["op"],
            "Shape": row["shape"],
            **({"Timed": _TIMED[row["implementation"]]} if has_both else {}),
            "p50 µs": _rounded(row["p50_us"]),
            "p20..p80": f"{formatting.number(row['p20_us'])}..{formatting.number(row['p80_us'])}",
            "GB/s": _rounded(row["gb_per_s"]),
            "TFLOP/s": _rounded(row["tflop_per_s"]),
            "Share of limit": row["share_of_limit"] * 100,
            "Limit": row["limited_by"],
            "Kernel's check": check_text(row),
        }
        for row in timed
    ]
    column = st.column_config
    # Widths for which a page of 1,440 pixels has room, the longest texts of the registry in mind.
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        lazy=False,
        height="content" if len(rows) <= SHORT_TABLE else 600,
        placeholder=formatting.NONE,
        key="kernel-table",
        column_config={
            "Op": column.TextColumn(pinned=True, width=165),
            "Shape": column.TextColumn(width=170),
            "Timed": column.TextColumn(width=80, help="The Triton kernel, or the torch reference."),
            "p50 µs": column.NumberColumn(format="localized", width=62, help="Median of the samples."),
            "p20..p80": column.TextColumn(width=100, help="The middle 60 % of the samples, µs."),
            "GB/s": column.NumberColumn(format="localized", width=58, help="Bytes that have to move / p50."),
            "TFLOP/s": column.NumberColumn(format="%.3g", width=68, help="Arithmetic of the formula / p50."),
            "Share of limit": column.ProgressColumn(
                format="%.1f %%",
                min_value=0,
                max_value=100,
                width=110,
                help="The larger of GB/s over the read limit and TFLOP/s over the matmul limit.",
            ),
            "Limit": column.TextColumn(width=78, help="Which of the two limits the share is of."),
            "Kernel's check": column.TextColumn(
                width=105 if has_both else 135, help="Triton kernel against the torch reference, in this run."
            ),
        },
    )


def checks(rows: Sequence[Any]) -> None:
    """With their errors, of each op on each shape that was checked."""
    texts = [
        {
            "Op": row["op"],
            "Shape": row["shape"],
            "Kernel's check": check_text(row),
            "Max abs error": formatting.number(row["max_abs_error"]),
            "Max rel error": formatting.number(row["max_rel_error"]),
        }
        for row in rows
    ]
    height = "content" if len(texts) <= SHORT_TABLE else 600
    st.dataframe(pd.DataFrame(texts), hide_index=True, lazy=False, height=height, key="kernel-checks")


def check_text(row: Any) -> str:
    """A check in words; "not checked" where the run has none for this op."""
    if row["passed"] is None:
        return "not checked"
    where = ", interpreted" if row["interpreted"] else ""
    return f"{'passed' if row['passed'] else 'FAILED'}{where}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
