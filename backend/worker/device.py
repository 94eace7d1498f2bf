"""Which device a config's model runs on."""

from __future__ import annotations

from typing import Literal

import torch

from backend.config import EngineConfig
from backend.errors import ConfigError


def choose_device(config: EngineConfig) -> Literal["cuda", "cpu"]:
    """What `model.device` asks for; "auto" is CUDA where torch finds it. Raises `ConfigError` where it finds none to use."""
    asked, found = config.model.device, torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ConfigError("model.device = 'cuda', but torch finds no CUDA device here; allowed: 'auto', 'cpu'")
    return "cuda" if asked != "cpu" and found else "cpu"
