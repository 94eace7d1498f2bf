"""Run ids as people write them. Imports nothing, so that a command line or an address can be read without a database."""

from __future__ import annotations

_MAX_DIGITS = 18  # a database's largest integer has 19


def parse_run_id(text: str) -> int | None:
    """The id that `12` or `#12` stands for, or None when the text is no run id."""
    digits = text.strip().removeprefix("#")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS else None
