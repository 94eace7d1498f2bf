"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits only before it reads.

What a kernel reads before `gdc_wait` must not come from the kernel launched just before it: weights, and what a step's
batch is described by, which an ordinary launch stands behind.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` may start early (compute capability 9.0 and newer; not Triton's interpreter)."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch_rows(row_ptrs, num_bytes):
    """Ask for the first `num_bytes` (a multiple of 16) at each pointer to be brought to the L2; nobody waits for them."""
    addresses = row_ptrs.to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses, tl.zeros_like(addresses).to(tl.int32) + num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
