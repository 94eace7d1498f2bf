"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
