"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from types import ModuleType

import torch

from tests.kernels.quick_interpreter import hasten_interpreter


def interpret_without_cuda() -> None:
    """Choose the interpreter for every kernel imported from now on, if there is no GPU. To be called before such imports.

    The variable is read when a function is decorated, triton's own library included, and another test's imports
    (transformers imports triton) may have come first: what holds such functions is forgotten. Triton's compiled part
    stays: it cannot be loaded twice.
    """
    if torch.cuda.is_available():
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        for name, module in list(sys.modules.items()):
            is_triton = name.split(".")[0] == "triton" and not name.startswith("triton._C")
            if is_triton or name.startswith("kernels.ops.") or _took_from_kernels(name, module):
                del sys.modules[name]
    if find_spec("triton") is not None:
        hasten_interpreter()


def _took_from_kernels(name: str, module: ModuleType) -> bool:
    if name.split(".")[0] not in ("backend", "kernels"):
        return False
    return any(str(getattr(value, "__module__", "")).startswith("kernels.ops.") for value in vars(module).values())
