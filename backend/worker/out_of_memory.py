"""Telling a device that has no memory left from one that has failed."""

from __future__ import annotations

import torch

# How the driver's errors end up in PyTorch and in Triton ("Triton Error [CUDA]: out of memory"), and how cuBLAS says that it
# found no room for its workspace. They come as plain `RuntimeError`s, or as `torch.AcceleratorError`s, which are such.
_SAYINGS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch's allocator, the driver or a library refused memory on the device.

    Also behind an error that followed from it: a graph whose capture is cut short fails once more when the capture ends.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, torch.OutOfMemoryError):
            return True
        if isinstance(link, RuntimeError) and any(saying in str(link) for saying in _SAYINGS):
            return True
        link = link.__cause__ or link.__context__
    return False
