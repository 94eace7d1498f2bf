"""What this device can do at most, measured: no figure of a kernel is believed that is faster."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from kernels.timing import ONCE, cache_bytes, time_call

# Many times any cache, and on a card so many that a launch's begin and end do not count.
READ_BYTES = {"cuda": 2**31, "cpu": 2**27}
MAX_MEMORY_SHARE = 0.2  # of a card's free memory, for each of the two arrays of that size
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, slots=True)
class Limits:
    """The fastest that was seen of reading memory and of multiplying matrices.

    Attributes:
        device: the card's name, or the CPU's.
        dtype: of the matrices.
        cache_bytes: what inputs have to exceed so as not to be found in a cache.
        read_bytes_per_s: of a sum or a copy (bytes read and written) that fits no cache, whichever is faster.
        matmul_flops_per_s: of `torch.mm` on square matrices, TF32 allowed for float32: kernels use it too.
    """

    device: str
    dtype: str
    cache_bytes: int
    read_bytes_per_s: float
    matmul_flops_per_s: float

    def highest(self, other: Limits) -> Limits:
        """The higher of two measurements of the same device: a busy moment only ever makes one too low."""
        return Limits(
            self.device,
            self.dtype,
            self.cache_bytes,
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.matmul_flops_per_s, other.matmul_flops_per_s),
        )


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure both limits of `device`."""
    return Limits(
        device=device_name(device),
        dtype=dtype_name(dtype),
        cache_bytes=cache_bytes(device),
        read_bytes_per_s=_measure_read(device),
        matmul_flops_per_s=_measure_matmul(device, dtype),
    )


def measure_byte_matmul(device: torch.device) -> float:
    """Operations a second of the library's product of square matrices in 8 bits on a card, floats or integers by which is faster.

    The matrix unit takes both alike, and the library's product of one of them may lag behind.
    """
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randint(-8, 8, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    seconds = time_call(
        lambda: torch._int_mm(left, right.t()),  # pyright: ignore[reportPrivateImportUsage]
        ONCE,
        device,
        capture=False,
    ).p20
    if torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        floats = [codes.to(torch.float8_e4m3fn) for codes in (left, right)]

        def product() -> None:
            torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                floats[0], floats[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )

        seconds = min(seconds, time_call(product, ONCE, device, capture=False).p20)
    return 2 * size**3 / seconds


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measure_read(device: torch.device) -> float:
    num_bytes = READ_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, int(MAX_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]))
    num_bytes = num_bytes // 4 * 4
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    total = torch.zeros((), dtype=torch.float32, device=device)
    summed = time_call(lambda: torch.sum(source, dim=0, out=total), ONCE, device, capture=False)
    copied = time_call(lambda: target.copy_(source), ONCE, device, capture=False)
    return max(num_bytes / summed.p20, 2 * num_bytes / copied.p20)


def _measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    output = torch.empty(size, size, dtype=dtype, device=device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        seconds = time_call(lambda: torch.mm(left, right, out=output), ONCE, device, capture=False).p20
    finally:
        torch.set_float32_matmul_precision(precision)
    return 2 * size**3 / seconds
