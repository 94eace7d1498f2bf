"""Numbers as a person reads them, the same on the command line and on every page.

Three significant digits, always a unit, and "–" for a value that does not exist. Counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from backend.core.speculation import is_synthetic
from backend.metrics.definitions import DEFINITIONS
from backend.metrics.stats import Phase

NONE = "–"
MINUS = "−"

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float | None) -> str:
    """Three significant digits: 12.3, 1,230, 0.0123, 1.23e-7."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    # The exponent is read off the rounded digits, so that 999.9 becomes 1,000 and not 1,000.0.
    mantissa, exponent = f"{abs(value):.2e}".split("e")
    power = int(exponent)
    if -4 <= power < 9:
        text = f"{float(f'{mantissa}e{exponent}'):,.{max(0, 2 - power)}f}"
    else:
        text = f"{mantissa}e{power}"
    return text if value > 0 else MINUS + text.replace("e-", f"e{MINUS}")


def count(value: int | None) -> str:
    """Exact, with thousands separated: 12,345."""
    return NONE if value is None else f"{value:,}".replace("-", MINUS)


def percent(fraction: float | None) -> str:
    """A fraction as a percentage with one decimal: 0.1234 is 12.3 %."""
    if fraction is None or not math.isfinite(fraction):
        return NONE
    return f"{fraction * 100:,.1f} %".replace("-", MINUS)


def difference(relative: float | None) -> str:
    """A change relative to a baseline: −18.0 %, +42.0 %; from twice the baseline on as a factor, ×2.40."""
    if relative is None or not math.isfinite(relative):
        return NONE
    if relative >= 1:
        return f"×{number(relative + 1)}"
    return f"{relative * 100:+.1f} %".replace("-", MINUS)


def memory(num_bytes: float | None) -> str:
    """Memory in binary units, three significant digits: 1.50 GiB."""
    return _scaled(num_bytes, 1024, _BINARY_UNITS)


def file_size(num_bytes: float | None) -> str:
    """A file or a download in decimal units, three significant digits: 98.4 MB."""
    return _scaled(num_bytes, 1000, _DECIMAL_UNITS)


def duration(seconds: float | None) -> str:
    """A span a person waited: 830 ms, 12.3 s, 2 min 05 s, 1 h 02 min."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{number(seconds * 1000)} ms"
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min"


def quantity(value: float | None, unit: str) -> str:
    """A value with its unit, in the manner of that unit: "bytes" scale, "%" takes a fraction, integers are exact."""
    if value is None:
        return NONE
    match unit:
        case "bytes":
            return memory(value)
        case "%":
            return percent(value)
    text = count(value) if isinstance(value, int) else number(value)
    return f"{text} {unit}" if unit and text != NONE else text


def metric(name: str, value: float | None) -> str:
    """A figure of a run in its unit; `name` is a summary field, or a statistic of one: "ttft_ms.p50"."""
    return quantity(value, DEFINITIONS[name.partition(".")[0]].unit)


def metric_label(name: str) -> str:
    """What a metric is called: "Output throughput", "Time to first token (TTFT), p50"."""
    field, _, statistic = name.partition(".")
    label = DEFINITIONS[field].label
    return f"{label}, {statistic}" if statistic else label


def setting(value: object) -> str:
    """A stored setting or fact as it is, in the spelling of a config file: true, 16, bfloat16."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(setting(item) for item in value) or NONE
    return str(value)


def timestamp(moment: datetime | None) -> str:
    """Local time to the second; an aware datetime is converted."""
    return NONE if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def run_name(run_id: int, label: str | None = None) -> str:
    """How a run is called everywhere: #12, or with its label, #12 baseline."""
    return f"#{run_id} {label}" if label else f"#{run_id}"


def failed_requests(summaries: Mapping[int, Mapping[str, Any] | None]) -> str | None:
    """Which runs (by id) are measured by a part of their requests only: "#3: 2 of 16 requests failed; ..."."""
    parts = [
        f"#{run_id}: {count(summary['num_failed'])} of {count(summary['num_requests'])} requests failed"
        for run_id, summary in summaries.items()
        if summary and summary.get("num_failed")
    ]
    if not parts:
        return None
    return f"{', '.join(parts)}; {'its' if len(parts) == 1 else 'their'} figures are of the rest"


def synthetic_runs(configs: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Which runs (by id) accepted drafts at a set rate: "#3: synthetic drafts, ..."."""
    named = ", ".join(f"#{run_id}" for run_id, config in configs.items() if is_synthetic(config))
    return f"{named}: synthetic drafts, accepted at a set rate; times are real, tokens mean nothing" if named else None


def phase_text(phase: Phase) -> str:
    """What a run is doing: "pulling 34.0 MB of 98.4 MB", "running 12 of 64"."""
    if phase.done is None:
        return phase.name
    show = file_size if phase.unit == "bytes" else _whole
    text = f"{phase.name} {show(phase.done)}"
    if phase.total is not None:
        text += f" of {show(phase.total)}"
    return text if phase.unit in ("", "bytes") else f"{text} {phase.unit}"


def _whole(value: float) -> str:
    return count(int(value)) if value == int(value) else number(value)


def _scaled(num_bytes: float | None, base: int, units: tuple[str, ...]) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return NONE
    scale = 0
    # 999.5 already rounds to four digits, which the next unit shows as 1.00 (or 0.976 of a binary one).
    while abs(num_bytes) >= 999.5 and scale < len(units) - 1:
        num_bytes /= base
        scale += 1
    text = count(int(num_bytes)) if scale == 0 else number(num_bytes)
    return f"{text} {units[scale]}"
