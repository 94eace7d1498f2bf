"""How many registers a launch gives each thread. Not an op."""

from __future__ import annotations

MAX_REGISTERS = 255  # of a thread
MULTIPROCESSOR_REGISTERS = 65536


def all_registers(num_warps: int) -> dict[str, int]:
    """The launch option that gives a thread all that a multiprocessor has for it.

    Of itself the compiler makes do with fewer, and then asks for what is left of x after its first product only.
    """
    return {"maxnreg": min(MAX_REGISTERS, MULTIPROCESSOR_REGISTERS // (32 * num_warps))}
