"""The most memory that this process holds over a time, as far as the operating system tells."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Self

import psutil

_INTERVAL_S = 0.02  # what is held for less may be missed; looking takes some microseconds


class ResidentPeak:
    """While inside, `num_bytes` is the largest resident set seen so far; None where it cannot be seen.

    What was freed before is given back to the system first where that can be asked for (glibc): it would count as held.
    """

    def __init__(self) -> None:
        self.num_bytes: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident-peak", daemon=True)

    def __enter__(self) -> Self:
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        try:
            self.num_bytes = max(self.num_bytes or 0, psutil.Process().memory_info().rss)
        except psutil.Error:
            self._ended.set()
