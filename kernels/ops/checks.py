"""What launchers check of their arguments. None of it reads a device value, so none of it waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
