"""Which process a run belongs to, and whether that process is still there."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

# The kernel tells a process's creation through the boot time, which it rounds to whole seconds: two readings may differ by
# one. A second process with the same id cannot follow that fast.
_SAME_START_S = 1.5


@dataclass(frozen=True, slots=True)
class Owner:
    """A process; its creation time tells it from a later one that was given the same id."""

    host: str
    pid: int
    started: float  # seconds since the epoch

    @classmethod
    def this_process(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @property
    def is_here(self) -> bool:
        """Whether it belongs to this machine, the only one whose processes can be seen."""
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; of another machine's process nothing is known."""
        if not self.is_here:
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True  # killed, and not yet collected by its parent
            return abs(process.create_time() - self.started) > _SAME_START_S
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False
