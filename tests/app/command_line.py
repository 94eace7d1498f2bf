"""What the fixture `cli` gives."""

from __future__ import annotations

from collections.abc import Callable

Cli = Callable[..., tuple[int, str, str]]  # arguments -> exit code, stdout, stderr
