"""Every op that has a kernel, by name.

Importing this needs no triton; asking for a launcher does.
"""

from __future__ import annotations

from kernels.kernel_op import KernelOp
from kernels.specs import paged_attention, rms_norm, store_kv_cache

REGISTRY: dict[str, KernelOp] = {spec.OP.name: spec.OP for spec in (rms_norm, store_kv_cache, paged_attention)}
