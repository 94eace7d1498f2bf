"""The sampler beside the step loop, the machine's description, and the group of sinks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time

import psutil
import pytest

from backend.metrics.environment import environment
from backend.metrics.gpu_monitor import TelemetrySampler
from backend.metrics.sinks import PeakSink, SinkGroup
from backend.metrics.stats import MemoryUse, Phase, RunEnd, StepStats, TelemetrySample
from backend.metrics.summary import SwapTotals
from tests.waiting import until


def test_sampler_samples_at_the_start_in_between_and_at_the_end():
    samples: list[TelemetrySample] = []
    sampler = TelemetrySampler(0.02, lambda: MemoryUse(300, 200, None, 900), samples.append)
    before = time.perf_counter()
    sampler.start()
    until(lambda: len(samples) >= 3)
    sampler.stop()
    after = time.perf_counter()
    assert len(samples) >= 4  # that at the end included
    assert [sample.time for sample in samples] == sorted(sample.time for sample in samples)
    assert before <= samples[0].time <= samples[-1].time <= after
    assert {(sample.weights_bytes, sample.kv_cache_bytes) for sample in samples} == {(300, 200)}
    assert samples[-1].host_memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert samples[-1].device_memory_bytes is None
    assert samples[-1].gpu_percent is None
    assert samples[-1].cpu_percent is not None


def test_a_short_run_has_two_samples():
    samples: list[TelemetrySample] = []
    sampler = TelemetrySampler(60, lambda: MemoryUse(None, None, None, None), samples.append)
    sampler.start()
    sampler.stop()
    assert len(samples) == 2


def test_sampler_survives_a_question_that_fails(caplog: pytest.LogCaptureFixture):
    def no_answer() -> MemoryUse:
        raise RuntimeError("gone")

    sampler = TelemetrySampler(60, no_answer, lambda sample: None)
    with caplog.at_level(logging.ERROR):
        sampler.start()
        sampler.stop()
    assert "a telemetry sample failed" in caplog.text


def test_environment_is_json_and_names_the_machine():
    found = environment(cpu_threads=3)
    json.dumps(found, allow_nan=False)
    assert found["cpu_threads"] == 3
    assert found["usable_cores"] >= 1
    assert found["ram_bytes"] > 2**28
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"]
    assert found["versions"]["streamlit"]
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40


def test_environment_and_stats_import_nothing_heavy():
    code = (
        "import sys; from backend.metrics import stats, live, gpu_monitor; from backend.metrics.environment import environment;"
        "environment(); print([name for name in ('torch', 'transformers', 'streamlit', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Recorder(PeakSink):
    """Remembers the names of the calls; raises in those it is told to."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.broken = broken

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise OSError("disk full")

    def on_step(self, stats: StepStats) -> None:
        self._note("step")

    def on_phase(self, phase: Phase) -> None:
        self._note(phase.name)

    def on_run_end(self, end: RunEnd) -> None:
        self._note("end")


def test_a_broken_sink_is_logged_once_and_stops_nobody(caplog: pytest.LogCaptureFixture):
    broken, sound = Recorder("step", "end"), Recorder()
    group = SinkGroup((broken, sound))
    step = StepStats(0, 2.0, 500.0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 3, 1, 4)
    with caplog.at_level(logging.ERROR):
        group.on_phase(Phase("running"))
        for _ in range(3):
            group.on_step(step)
        group.on_run_end(RunEnd("finished", 1.0))
        group.on_run_end(RunEnd("failed", 2.0))
    assert broken.calls == sound.calls == ["running", "step", "step", "step", "end"]
    assert sum("failed in on_step" in record.message for record in caplog.records) == 1


def test_peaks_of_kv_cache_leave_the_warmup_out():
    now = [10.0]
    peaks = PeakSink(lambda: now[0])
    full = StepStats(0, 9.9, 100.0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 8, 0, 0)
    half = StepStats(1, 10.3, 200.0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 4, 2, 2)
    peaks.on_phase(Phase("warming up", 0, 1))
    peaks.on_step(full)
    assert peaks.kv_cache_usage is None
    peaks.on_phase(Phase("running", 0, 1))
    peaks.on_step(half)
    assert peaks.kv_cache_usage == 0.5


def test_what_was_swapped_is_added_up_without_the_warmup():
    """Blocks of 100 bytes; a request may go out without any, when the host has all of it already."""
    now = [10.0]
    peaks = PeakSink(lambda: now[0])

    def step(end_time: float, num_swapped: int, num_out: int, num_in: int) -> StepStats:
        counts = (num_swapped, num_out, num_in, 100 * (num_out + num_in))
        return StepStats(0, end_time, 50.0, 1, 1, 1, 1, 0, 1, 1, 1, 0, num_swapped, 4, 2, 2, *counts)

    peaks.on_phase(Phase("warming up", 0, 1))
    peaks.on_step(step(9.9, 7, 7, 7))
    peaks.on_phase(Phase("running", 0, 1))
    for swapped in (step(10.1, 2, 30, 0), step(10.2, 0, 0, 0), step(10.3, 1, 0, 0), step(10.4, 1, 12, 25)):
        peaks.on_step(swapped)
    assert peaks.swapped == SwapTotals(4, 4200, 2500)


def test_peak_memory_is_the_devices_where_there_is_one():
    peaks = PeakSink()
    peaks.on_sample(TelemetrySample(0.0, 1000, 50, None, None, None, None, None))
    assert peaks.memory_bytes == 50
    peaks.add_memory(None)
    peaks.add_memory(70)
    peaks.add_memory(60)
    assert peaks.memory_bytes == 70
    on_cpu = PeakSink()
    on_cpu.on_sample(TelemetrySample(0.0, 1000, None, None, None, None, None, None))
    assert on_cpu.memory_bytes == 1000
