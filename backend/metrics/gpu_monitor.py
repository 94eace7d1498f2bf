"""The card through NVML, and a sampler of memory and load that runs beside the step loop. No torch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from backend.metrics.stats import MemoryUse, TelemetrySample

logger = logging.getLogger(__name__)


class GpuMonitor:
    """The first card that CUDA would show this process. What the driver does not tell is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls) -> GpuMonitor | None:
        """None without an NVIDIA driver, a card, or the NVML bindings."""
        try:
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml, _visible_handle(pynvml))
        except Exception as error:  # ImportError, NVMLError, a missing library: all mean that there is no card to see
            logger.debug("no GPU telemetry: %s", error)
            return None

    @property
    def name(self) -> str | None:
        return self._ask(lambda nvml: _text(nvml.nvmlDeviceGetName(self._handle)))

    @property
    def driver(self) -> str | None:
        return self._ask(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))

    @property
    def memory_bytes(self) -> int | None:
        return self._ask(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(self._handle).total))

    @property
    def busy_percent(self) -> float | None:
        """Share of the driver's last sample period in which a kernel ran."""
        return self._ask(lambda nvml: float(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu))

    @property
    def power_w(self) -> float | None:
        return self._ask(lambda nvml: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._nvml)
        except Exception:  # NVMLError "not supported": virtual and older cards leave out single figures
            return None


class TelemetrySampler:
    """Emits a `TelemetrySample` at the start, every `interval_s`, and at the end, from a thread of its own.

    Args:
        interval_s: seconds between samples.
        memory: what the engine holds now; called from the sampler's thread.
        emit: receives the samples and must return at once.
    """

    def __init__(
        self, interval_s: float, memory: Callable[[], MemoryUse], emit: Callable[[TelemetrySample], None]
    ) -> None:
        self._interval_s = interval_s
        self._memory = memory
        self._emit = emit
        self._process = psutil.Process()
        self._gpu: GpuMonitor | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="servelab-telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take the last sample and wait for it."""
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        self._gpu = GpuMonitor.open()
        self._process.cpu_percent()  # measures from one call to the next: the first says nothing
        self._sample(first=True)
        while not self._stop.wait(self._interval_s):
            self._sample()
        self._sample()

    def _sample(self, first: bool = False) -> None:
        try:
            memory = self._memory()
            # The card's load is the run's only when the run uses the card.
            gpu = self._gpu if memory.device_memory_bytes is not None else None
            self._emit(
                TelemetrySample(
                    time=time.perf_counter(),
                    host_memory_bytes=self._process.memory_info().rss,
                    device_memory_bytes=memory.device_memory_bytes,
                    weights_bytes=memory.weights_bytes,
                    kv_cache_bytes=memory.kv_cache_bytes,
                    cpu_percent=None if first else self._process.cpu_percent(),
                    gpu_percent=gpu.busy_percent if gpu else None,
                    gpu_power_w=gpu.power_w if gpu else None,
                )
            )
        except Exception:
            logger.exception("a telemetry sample failed; the run goes on")


def _visible_handle(nvml: Any) -> Any:
    """NVML counts all cards of the machine; CUDA shows those that CUDA_VISIBLE_DEVICES names, by number or UUID."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first else 0)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
