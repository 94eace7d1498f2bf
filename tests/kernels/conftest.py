"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from tests.interpreter import interpret_without_cuda
from tests.kernels.quick_interpreter import patch_language_once_a_launch

interpret_without_cuda()
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    patch_language_once_a_launch()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
