"""Ports for servers that must be told theirs."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _LAST, _PER_PROCESS = 12_000, 32_000, 50
_numbers = itertools.count()


def unused_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that nobody is likely to take before the server starts.

    It lies below those that the system hands out to whoever asks for any, and processes that run tests beside each other
    begin to look at different places.
    """
    for number in _numbers:
        port = _FIRST + (os.getpid() * _PER_PROCESS + number) % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("numbers do not end")
