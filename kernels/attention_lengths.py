"""Attention over length: scores written out against scores never written out, in time and memory.

Unfused attention stores all `length^2` scores of a head; FlashAttention (Dao et al., 2022, arXiv:2205.14135) keeps a
tile of them at a time. Compared are a plain torch version, torch's own fused one, and ours over the paged cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.kernel_op import Inputs
from kernels.registry import REGISTRY
from kernels.timing import Rotation, time_call

LENGTHS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024, 2048)}
# One request, causal. The sizes of an 8-billion-parameter model, and what a CPU can do in a few seconds.
HEADS = {
    "cuda": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "cpu": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
}


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """One implementation at one length. A point that does not fit the device's memory says so and has no figures."""

    implementation: str
    length: int
    num_samples: int | None = None
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    peak_memory_bytes: int | None = None  # allocated at once beyond the inputs, the output included
    max_abs_error: float | None = None  # against the first that fits, in the same dtype
    problem: str | None = None


def attention_points(length: int, device: torch.device, dtype: torch.dtype) -> Iterator[AttentionPoint]:
    """Every implementation at one length."""
    op = REGISTRY["paged_attention"]
    inputs = op.make_inputs(dtype, device, query_lens=[length], seq_lens=[length], **HEADS[device.type])
    query, key, value = _contiguous(inputs)
    scale = inputs["scale"]
    paged = op.launch if device.type == "cuda" else op.reference
    calls: dict[str, Callable[[], Any]] = {
        "unfused": lambda: unfused_attention(query, key, value, scale),
        "fused, torch": lambda: _torch_attention(query, key, value, scale),
        "paged, ours" if device.type == "cuda" else "paged reference": lambda: paged(**inputs),
    }
    expected: Tensor | None = None
    for name, call in calls.items():
        try:
            output = call()
            output = output if output.dim() == 3 else output[0].transpose(0, 1)
            expected = output if expected is None else expected
            error = float((output.float() - expected.float()).abs().max()) if expected is not None else None
            del output
            peak = peak_memory_bytes(call, device)
            spread = time_call(call, Rotation([{}], needs_sweep=True), device, capture=False)
        except torch.OutOfMemoryError:
            yield AttentionPoint(name, length, problem="it does not fit this card's free memory")
            continue
        yield AttentionPoint(
            name,
            length,
            num_samples=spread.num_samples,
            p20_us=spread.p20 * 1e6,
            p50_us=spread.p50 * 1e6,
            p80_us=spread.p80 * 1e6,
            peak_memory_bytes=peak,
            max_abs_error=None if name == "unfused" else error,
        )


def unfused_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal `softmax(scale * Q K^T) V` with every score in memory.

    Args:
        query, key, value: float [1, num_heads, length, head_dim]
    Returns:
        query.dtype [1, num_heads, length, head_dim]
    """
    length = query.shape[2]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ value


def peak_memory_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that tensors made within `call` hold at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _StorageCount() as count:
        call()
    return count.peak


class _StorageCount(TorchDispatchMode):
    """Adds up the storages that operators return, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in inputs:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        size, identity = storage.nbytes(), storage._cdata
        self._known.add(identity)
        self._held += size
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._drop, identity, size)

    def _drop(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self._held -= size


def _contiguous(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The paged op's one request as [1, num_heads, length, head_dim], each KV head repeated for its query heads."""
    query: Tensor = inputs["query"]
    length, num_heads, head_dim = query.shape
    blocks = inputs["block_table"][0].long()

    def gathered(cache: Tensor) -> Tensor:
        tokens = cache[blocks].reshape(-1, cache.shape[2], head_dim)[:length]
        return tokens.repeat_interleave(num_heads // cache.shape[2], dim=1).transpose(0, 1)[None].contiguous()

    key, value = gathered(inputs["key_cache"]), gathered(inputs["value_cache"])
    return query.transpose(0, 1)[None].contiguous(), key, value


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    half = query.dtype in (torch.float16, torch.bfloat16)
    # torch's flash kernel takes 16-bit values only; for others on CUDA torch chooses.
    chosen = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.is_cuda and half else nullcontext()
    with chosen:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
