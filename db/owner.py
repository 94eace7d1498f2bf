"""Which process a run belongs to, and whether that process is still there.

A run may only be called interrupted when its process is known to have ended. What is known depends on where one looks from:

| the owner's host, boot and pid namespace | what is known of it |
|---|---|
| all the same as here | whether a process with its id and its start exists |
| same host name, another boot | it is gone: the machine was started anew |
| same host name and boot, another namespace | nothing: its ids mean nothing here (a container that shares the database) |
| another host name | nothing |
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_PROC = Path("/proc")
# Where there is no /proc, creation times are compared as seconds since the epoch, and two readings may differ by a rounding.
# A second process with the same id cannot follow that fast.
_SAME_START_S = 1.5


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. Its start tells it from a later one that was given the same id."""

    host: str
    boot_id: str | None  # of the kernel's present run; None where /proc does not say
    pid_namespace: int | None  # inode of the namespace that `pid` counts in; None where there are none
    pid: int
    start_ticks: int | None  # clock ticks from boot to the process's start; None where /proc does not say
    # The same in seconds since the epoch, for people and for systems without /proc: on Linux, setting the clock moves it.
    started: float = field(compare=False)

    @classmethod
    def this_process(cls) -> Owner:
        stat = _read_stat("self")
        return cls(
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            start_ticks=None if stat is None else stat.start_ticks,
            started=psutil.Process().create_time(),
        )

    @property
    def is_this_process(self) -> bool:
        return self == Owner.this_process()

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; see the table above."""
        if self.host != socket.gethostname():
            return False
        boot_id = _boot_id()
        if self.boot_id != boot_id:
            return self.boot_id is not None and boot_id is not None
        if self.pid_namespace != _pid_namespace():
            return False
        return not (self._is_there_by_time() if self.start_ticks is None else self._is_there_by_ticks())

    def _is_there_by_ticks(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # there, and another user's
        stat = _read_stat(str(self.pid)) if _proc_is_of_this_namespace() else None
        if stat is None:
            return True  # there, but hidden from us: nothing says that it is a later one
        return stat.start_ticks == self.start_ticks and stat.state not in "ZX"  # Z, X: ended, and not yet collected

    def _is_there_by_time(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) <= _SAME_START_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    start_ticks: int


def _read_stat(pid: str) -> _Stat | None:
    """`/proc/PID/stat`; None where it cannot be read."""
    try:
        text = (_PROC / pid / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command's name in parentheses and may hold anything, spaces and parentheses included.
    fields = text.rpartition(")")[2].split()  # from the third field on
    return _Stat(state=fields[0], start_ticks=int(fields[19]))


def _boot_id() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _pid_namespace() -> int | None:
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return None


def _proc_is_of_this_namespace() -> bool:
    """False where /proc was mounted outside and not anew: its numbers are then other processes."""
    try:
        return os.readlink(_PROC / "self") == str(os.getpid())
    except OSError:
        return False
