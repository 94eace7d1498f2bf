"""The most memory held: it is seen while it is held, and does not go with it."""

from __future__ import annotations

import platform

import psutil
import pytest

from backend.experiments.resident_peak import ResidentPeak
from tests.waiting import until

SIZE = 64 * 2**20


def test_what_was_held_for_a_while_counts() -> None:
    with ResidentPeak() as peak:
        before = peak.num_bytes
        assert before is not None
        held = bytearray(b"x") * SIZE
        until(lambda: (peak.num_bytes or 0) > before + SIZE * 0.9)
        del held
    assert peak.num_bytes is not None
    assert before + SIZE * 0.9 < peak.num_bytes
    with ResidentPeak() as later:
        pass
    assert later.num_bytes is not None
    assert later.num_bytes < peak.num_bytes - SIZE / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_was_freed_before_does_not_count() -> None:
    """Small pieces, which lie on the heap, below one that stays: the heap does not shrink by itself."""
    pieces = [bytearray(b"x") * 2**16 for _ in range(SIZE // 2**16)]
    last = bytearray(b"x") * 2**16
    held = psutil.Process().memory_info().rss
    del pieces
    with ResidentPeak() as peak:
        pass
    assert peak.num_bytes is not None
    assert peak.num_bytes < held - SIZE / 2
    del last


def test_what_is_held_at_the_end_counts() -> None:
    with ResidentPeak() as peak:
        held = bytearray(b"x") * SIZE
    assert peak.num_bytes is not None
    assert peak.num_bytes >= len(held)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_info", refuse)
    with ResidentPeak() as peak:
        pass
    assert peak.num_bytes is None
