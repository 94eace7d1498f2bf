"""One bar cut into labelled shares: where memory or blocks go. HTML, so that it costs a live page next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import streamlit as st


class Share(NamedTuple):
    label: str
    amount: float
    text: str  # the amount as it is read
    colour: str


def share_bar(title: str, shares: Sequence[Share], total_text: str) -> None:
    """Draw shares side by side in proportion, each named below with its amount."""
    st.html(share_bar_html(title, shares, total_text))


def share_bar_html(title: str, shares: Sequence[Share], total_text: str) -> str:
    total = sum(share.amount for share in shares) or 1.0
    segments = "".join(
        f'<div style="width:{100 * share.amount / total:.3f}%;background:{share.colour}"'
        f' title="{escape(share.label)}: {escape(share.text)}"></div>'
        for share in shares
    )
    names = "".join(
        '<span style="white-space:nowrap;margin-right:1.1em">'
        f'<span style="display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.4em;'
        f'background:{share.colour}"></span>{escape(share.label)} <b>{escape(share.text)}</b></span>'
        for share in shares
    )
    return (
        '<div style="font-size:.87rem;line-height:1.6">'
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;column-gap:1em">'
        f'<span style="font-weight:600">{escape(title)}</span>'
        f'<span style="opacity:.75">{escape(total_text)}</span></div>'
        '<div style="display:flex;height:14px;border-radius:4px;overflow:hidden;margin:.25em 0 .35em;'
        f'background:rgba(128,134,145,.18)">{segments}</div><div>{names}</div></div>'
    )
