"""What is said, as HTML: the characters as they are, and tokens told apart where somebody wants to see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from app import formatting
from app.components import palette
from app.components.playground_answer import PLAIN, Token


class Origin(NamedTuple):
    colour: str
    line: str  # under its tokens: the same thing for who cannot tell the colours
    meaning: str


ORIGINS = {
    "accepted": Origin(palette.ACCEPTED, "solid", "Drafted, and accepted by the target."),
    "recovered": Origin(palette.RECOVERED, "dotted", "Drawn by the target in place of a draft that it rejected."),
    "bonus": Origin(
        palette.BONUS, "double", "Drawn by the target on top, where it had accepted all drafts of a round."
    ),
    PLAIN: Origin("#8A94A3", "none", "Drawn by the target in a step without drafts."),
}

STYLE = (
    "<style>"
    ".sl-chat{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6;max-width:54rem}"
    ".sl-chat span{border-radius:2px}"
    ".sl-chat.tokens:not(.origins) span:nth-child(odd){background:rgba(0,114,178,.13)}"
    ".sl-chat.tokens:not(.origins) span:nth-child(even){background:rgba(230,159,0,.17)}"
    ".sl-chat.tokens.origins span{box-shadow:inset 1px 0 0 rgba(128,134,145,.8)}"
    ".sl-chat span.none{font-size:.78em;padding:0 .3em;opacity:.75}"
    ".sl-chat .caret{display:inline-block;width:.5em;height:1em;vertical-align:-.15em;background:currentColor;opacity:.45}"
    ".sl-origins{font-size:.87rem;line-height:1.8;display:flex;flex-wrap:wrap;column-gap:1.1em}"
    ".sl-origins span{white-space:nowrap;cursor:help}"
    ".sl-origins i{font-style:normal;padding:0 .35em;margin-right:.4em;border-radius:2px}"
    ".sl-origins i.plain{box-shadow:inset 0 0 0 1px rgba(128,134,145,.6)}"
    + "".join(
        f".sl-chat .{name},.sl-origins .{name}"
        f"{{background:{origin.colour}33;border-bottom:{3 if origin.line == 'double' else 2}px {origin.line} {origin.colour}}}"
        for name, origin in ORIGINS.items()
        if name != PLAIN
    )
    + "</style>"
)


def text_html(text: str) -> str:
    return f'<div class="sl-chat">{_escaped(text)}</div>'


def answer_html(tokens: Sequence[Token], *, show_tokens: bool, goes_on: bool = False) -> str:
    """An answer's text; token by token, with ids to point at, where they have origins or `show_tokens` asks for it."""
    caret = '<b class="caret"></b>' if goes_on else ""
    origins = has_origins(tokens)
    if not (show_tokens or origins):
        return f'<div class="sl-chat">{_escaped("".join(token.text for token in tokens))}{caret}</div>'
    kind = "sl-chat" + " tokens" * show_tokens + " origins" * origins
    return f'<div class="{kind}">{"".join(_token(token, show_tokens) for token in tokens)}{caret}</div>'


def has_origins(tokens: Sequence[Token]) -> bool:
    """Whether any came by speculation."""
    return any(token.origin != PLAIN for token in tokens)


def legend_html(tokens: Sequence[Token]) -> str:
    """What the colours mean, and how many tokens have them."""
    counts = Counter(token.origin for token in tokens)
    names = "".join(
        f'<span title="{escape(origin.meaning)}"><i class="{name}">&nbsp;</i>{name}'
        f" <b>{formatting.count(counts[name])}</b></span>"
        for name, origin in ORIGINS.items()
        if counts[name] or name != PLAIN
    )
    return f'<div class="sl-origins">{names}</div>'


def _token(token: Token, show_tokens: bool) -> str:
    origin = token.origin if token.origin in ORIGINS else PLAIN
    title = f"token {token.token_id}" + ("" if origin == PLAIN else f", {origin}")
    if token.text:
        text = token.text.replace("\n", "↵\n") if show_tokens else token.text
        return f'<span class="{origin}" title="{title}">{_escaped(text)}</span>'
    if not show_tokens:
        return ""
    what = "a special token" if token.name else "a part of a character, or a token without text"
    return f'<span class="{origin} none" title="{title}: {what}">{_escaped(token.name or str(token.token_id))}</span>'


def _escaped(text: str) -> str:
    # Streamlit would take the spaces out of a line that has nothing else, if it saw that it is one.
    return escape(text).replace("\n", "&#10;")
