"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # The variable is read when a function is decorated, triton's own library included, and another test's imports
    # (transformers imports triton) may have come first. The compiled part stays: it cannot be loaded twice.
    for _name in list(sys.modules):
        _is_triton = _name.split(".")[0] == "triton" and not _name.startswith("triton._C")
        if _is_triton or _name.startswith("kernels.ops."):
            del sys.modules[_name]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
