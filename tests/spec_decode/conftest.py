"""What tests of heads train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.spec_decode.heads import train_head
from tests.helpers import make_tiny_llama


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A target, and conversations of it that take no time to write."""
    monkeypatch.setattr(train_head, "MAX_LENGTH", 96)
    monkeypatch.setitem(train_head._CONVERSATIONS_AT_ONCE, "cpu", 4)
    return make_tiny_llama(tmp_path / "target")
