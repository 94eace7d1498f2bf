from __future__ import annotations

from datetime import UTC, datetime

import pytest

from app import formatting
from backend.metrics.stats import Phase


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "–"),
        (0, "0"),
        (0.0, "0"),
        (1, "1.00"),
        (12.345, "12.3"),
        (99.95, "100"),
        (9.996, "10.0"),
        (999.9, "1,000"),
        (1234.5, "1,230"),
        (1_234_567, "1,230,000"),
        (0.012345, "0.0123"),
        (0.00099999, "0.00100"),
        (1.234e-7, "1.23e-7"),
        (1.2e12, "1.20e12"),
        (-0.5, "−0.500"),
        (-1.234e-7, "−1.23e−7"),
    ],
)
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert formatting.number(value) == text


def test_counts_are_exact() -> None:
    assert formatting.count(1_234_567) == "1,234,567"
    assert formatting.count(0) == "0"
    assert formatting.count(None) == "–"


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        (None, "–"),
        (0.0, "+0.0 %"),
        (-0.18, "−18.0 %"),
        (0.42, "+42.0 %"),
        (1.0, "×2.00"),
        (9.0, "×10.0"),
        (-1.0, "−100.0 %"),
    ],
)
def test_differences_are_percent_until_they_are_factors(relative: float | None, text: str) -> None:
    assert formatting.difference(relative) == text


@pytest.mark.parametrize(
    ("num_bytes", "binary", "decimal"),
    [
        (None, "–", "–"),
        (0, "0 B", "0 B"),
        (512, "512 B", "512 B"),
        (1024, "1.00 KiB", "1.02 kB"),
        (98_362_432, "93.8 MiB", "98.4 MB"),
        (2**30, "1.00 GiB", "1.07 GB"),
        (1023 * 2**20, "0.999 GiB", "1.07 GB"),
    ],
)
def test_sizes(num_bytes: int | None, binary: str, decimal: str) -> None:
    assert formatting.memory(num_bytes) == binary
    assert formatting.file_size(num_bytes) == decimal


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0123, "12.3 ms"),
        (5.0, "5.00 s"),
        (65, "1 min 05 s"),
        (59.9, "59.9 s"),
        (119.7, "2 min 00 s"),
        (3720, "1 h 02 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_quantities_follow_their_unit() -> None:
    assert formatting.quantity(12.34, "tok/s") == "12.3 tok/s"
    assert formatting.quantity(1234, "tokens") == "1,234 tokens"
    assert formatting.quantity(0.5, "%") == "50.0 %"
    assert formatting.quantity(2**30, "bytes") == "1.00 GiB"
    assert formatting.quantity(3, "") == "3"
    assert formatting.quantity(None, "ms") == "–"
    assert formatting.quantity(float("nan"), "ms") == "–"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (True, "true"), (16, "16"), ("auto", "auto"), (["a", None], "a, –"), ((), "–")]
)
def test_settings_are_spelled_as_in_a_config_file(value: object, text: str) -> None:
    assert formatting.setting(value) == text


def test_metrics_know_their_unit() -> None:
    assert formatting.metric("output_throughput_tok_s", 12.34) == "12.3 tok/s"
    assert formatting.metric("ttft_ms.p50", 40.0) == "40.0 ms"
    assert formatting.metric("peak_memory_bytes", 2**30) == "1.00 GiB"
    assert formatting.metric("kv_cache_usage_max", 0.25) == "25.0 %"
    assert formatting.metric("preemptions", None) == "–"
    assert formatting.metric_label("output_tokens") == "Output tokens"
    assert formatting.metric_label("ttft_ms.p99").endswith("(TTFT), p99")


def test_phases_say_how_far_they_are() -> None:
    assert formatting.phase_text(Phase("loading")) == "loading"
    assert formatting.phase_text(Phase("running", 12, 64)) == "running 12 of 64"
    assert formatting.phase_text(Phase("running", 12, 64, "requests")) == "running 12 of 64 requests"
    assert formatting.phase_text(Phase("pulling", 34e6, 98.4e6, "bytes")) == "pulling 34.0 MB of 98.4 MB"
    assert formatting.phase_text(Phase("pulling", 34e6, None, "bytes")) == "pulling 34.0 MB"


def test_names_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    assert formatting.run_name(12) == "#12"
    assert formatting.run_name(12, "baseline") == "#12 baseline"
    assert formatting.timestamp(None) == "–"
    moment = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
    assert formatting.timestamp(moment) == moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def test_runs_that_are_measured_by_a_part_of_their_requests_are_named() -> None:
    whole, part = {"num_requests": 16, "num_failed": 0}, {"num_requests": 16, "num_failed": 2}
    assert formatting.failed_requests({1: whole, 2: None}) is None
    assert formatting.failed_requests({1: whole, 3: part}) == "#3: 2 of 16 requests failed; its figures are of the rest"
    assert formatting.failed_requests({1: part, 2: whole, 3: part | {"num_requests": 2000}}) == (
        "#1: 2 of 16 requests failed, #3: 2 of 2,000 requests failed; their figures are of the rest"
    )
