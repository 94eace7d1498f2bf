"""Counters by which programs of one launch learn who comes last. Not an op: host-side memory only."""

from __future__ import annotations

import torch
from torch import Tensor

_COUNTERS: dict[torch.device, list[Tensor]] = {}


def arrival_counters(device: torch.device, count: int) -> Tensor:
    """Zeroed int32 counters, at least `count`; kernels leave them at zero.

    All launches share them, as those of a stream follow one another. Counters that turn out too few are kept beside the new
    ones: a captured graph may still use them.
    """
    known = _COUNTERS.setdefault(device, [])
    if not known or known[-1].numel() < count:
        known.append(torch.zeros(max(count, 4096), dtype=torch.int32, device=device))
    return known[-1]
