"""What launchers check of their arguments. None of it reads a device value, so none of it waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HEAD_DIM = 256  # of attention
MAX_GROUP = 128  # query heads that share a KV head
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a cache with scales: the format's name, fp16 numbers beside a vector, and values in a byte.
QUANTIZED = {torch.int8: ("int8", 1, 1), torch.float8_e4m3fn: ("fp8_e4m3", 1, 1), torch.uint8: ("int4", 2, 2)}


def check_float_dtype(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` has a dtype that the kernels compute with."""
    if tensor.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(_dtype_name(dtype) for dtype in FLOAT_DTYPES)
        raise ValueError(f"{name} is {_dtype_name(tensor.dtype)}; allowed are {allowed}")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless `tensor` is of this shape (None: any size), dtype and device, its last dimension dense."""
    # Every launch comes through here several times: plain comparisons, and words only where one fails.
    actual = tensor.shape
    fits = len(actual) == len(shape)
    for wanted_size, size in zip(shape, actual):  # noqa: B905  (lengths may differ)
        fits = fits and (wanted_size is None or wanted_size == size)
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(actual)}; expected [{wanted}]")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {_dtype_name(tensor.dtype)}; expected {_dtype_name(dtype)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1")


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: int | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> tuple[int, str | None]:
    """What every attention over the paged cache asks of its tensors.

    Returns the query heads that share a KV head, and what `check_kv_cache` does.

    Raises ValueError as `check_tensor`, and where num_kv_heads does not divide num_heads, a group or a head_dim is above
    what the kernels hold, or the window is below 1.
    """
    check_float_dtype("query", query)
    check_tensor("query", query, (None, None, None), query.dtype, query.device)
    _, num_heads, head_dim = query.shape
    kv_format = check_kv_cache(key_cache, value_cache, key_scales, value_scales, None, head_dim, query)
    num_kv_heads = key_cache.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads, which is no multiple of key_cache's {num_kv_heads}")
    group = num_heads // num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(f"{group} query heads share a KV head; at most {MAX_GROUP} are allowed")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"query has a head_dim of {head_dim}; allowed are 1 to {MAX_HEAD_DIM}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; allowed are 1 and more, or None")
    return group, kv_format


def check_trees(
    tree_mask: Tensor | None, tree_starts: Tensor | None, num_tokens: int, num_reqs: int, device: torch.device
) -> None:
    """Which rows are nodes of a tree, or None twice. Raises ValueError as `check_tensor`, or where one of them is missing."""
    if tree_mask is None and tree_starts is None:
        return
    if tree_mask is None or tree_starts is None:
        raise ValueError("tree_mask and tree_starts go together; one of them is None")
    check_tensor("tree_mask", tree_mask, (num_tokens,), torch.int64, device)
    check_tensor("tree_starts", tree_starts, (num_reqs,), torch.int32, device)


def check_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    like: Tensor,
) -> str | None:
    """What every op asks of the paged cache; how it is quantized, or None where it has no scales.

    Args:
        num_kv_heads, head_dim: what there must be of them; None: any
        like: has the dtype of a plain cache, and the device
    Raises:
        ValueError: as `check_tensor`; only one of the scales is given or they are not contiguous; a cache with scales has
            another dtype than those in `QUANTIZED`; or vectors of uint8 have an odd head_dim.
    """
    if key_scales is None and value_scales is None:
        check_tensor("key_cache", key_cache, (None, None, num_kv_heads, head_dim), like.dtype, like.device)
        check_tensor("value_cache", value_cache, tuple(key_cache.shape), like.dtype, like.device)
        return None
    if key_scales is None or value_scales is None:
        raise ValueError("key_scales and value_scales go together; one of them is None")
    if key_cache.dtype not in QUANTIZED:
        allowed = ", ".join(_dtype_name(dtype) for dtype in QUANTIZED)
        raise ValueError(f"key_cache is {_dtype_name(key_cache.dtype)} and has scales; allowed are {allowed}")
    kv_format, num_scales, values_per_byte = QUANTIZED[key_cache.dtype]
    if head_dim is not None and head_dim % values_per_byte:
        raise ValueError(f"{kv_format} holds {values_per_byte} values a byte, and a head_dim of {head_dim} is odd")
    width = None if head_dim is None else head_dim // values_per_byte
    check_tensor("key_cache", key_cache, (None, None, num_kv_heads, width), key_cache.dtype, like.device)
    check_tensor("value_cache", value_cache, tuple(key_cache.shape), key_cache.dtype, like.device)
    scales_shape = (*key_cache.shape[:3], num_scales)
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        check_tensor(name, scales, scales_shape, torch.float16, like.device)
        if not scales.is_contiguous():
            raise ValueError(f"{name} has strides {list(scales.stride())}; expected them contiguous")
    return kv_format


def as_bytes(cache: Tensor) -> Tensor:
    """8-bit floats as bytes, which every card's kernels take; other tensors as they are."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def check_product(x: Tensor, weight: Tensor, square_sums: Tensor | None, bias: Tensor | None) -> None:
    """What every product with a deferred norm asks of its tensors. Raises ValueError as `check_tensor`."""
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    num_tokens, num_columns = x.shape
    check_tensor("weight", weight, (None, num_columns), x.dtype, x.device)
    if square_sums is not None:
        check_tensor("square_sums", square_sums, (num_tokens, None), torch.float32, x.device)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), x.dtype, x.device)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
