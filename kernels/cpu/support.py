"""Whether this machine can run the kernels of this package; where it cannot, references compute."""

from __future__ import annotations

import platform
from functools import cache
from importlib.util import find_spec

# Without them LLVM would call functions for multiply-adds and float16 that no library here has.
_FEATURES = ("avx2", "fma", "f16c")


@cache
def has_cpu_kernels() -> bool:
    """An x86-64 CPU with AVX2, and llvmlite installed."""
    if platform.machine() not in ("x86_64", "AMD64") or find_spec("llvmlite") is None:
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in _FEATURES)
