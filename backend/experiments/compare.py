"""Runs side by side: every metric against a baseline, and only the settings that differ. No torch, no database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from backend.errors import ServeLabError

Verdict = Literal["better", "worse", "equal"]

_QUANTILES = ("p50", "p99")
_SMALLEST_DIFFERENCE = 5e-4  # what a percentage with one decimal still shows

# Metric -> whether a higher value is better; None where neither is.
_DIRECTIONS: dict[str, bool | None] = {
    "num_requests": None,
    "num_failed": False,
    "duration_s": False,
    "input_tokens": None,
    "output_tokens": None,
    "output_throughput_tok_s": True,
    "total_throughput_tok_s": True,
    "request_throughput_req_s": True,
    "goodput_req_s": True,
    **{f"{name}.{quantile}": False for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms") for quantile in _QUANTILES},
    "kv_cache_usage_max": None,
    "preemptions": False,
    **dict.fromkeys(("preemptions_swapped", "swapped_out_bytes", "swapped_in_bytes")),
    "prefix_cache_hit_rate": True,
    "draft_acceptance_rate": True,
    "mean_acceptance_length": True,
    "peak_memory_bytes": False,
}


_LABS = {"kernels": ("kernel", "Kernels"), "quantization": ("quantization", "Quantization")}


class ComparableRun(Protocol):
    """What a comparison reads of a stored run."""

    @property
    def run_id(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def label(self) -> str | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def resolved_config(self) -> Mapping[str, Any] | None: ...
    @property
    def workload(self) -> Mapping[str, Any]: ...
    @property
    def summary(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric over all runs, in their order. What a run does not have is None."""

    metric: str  # a summary field, or a quantile of one: "ttft_ms.p50"
    higher_is_better: bool | None  # None: neither is
    values: tuple[float | None, ...]
    differences: tuple[float | None, ...]  # (value - baseline) / baseline; None for the baseline and where undefined
    verdicts: tuple[Verdict | None, ...]  # against the baseline; None where there is none


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting that is not the same in all runs."""

    key: str  # dotted, as `--set` takes it: "cache.block_size", "workload.seed"
    values: tuple[Any, ...]  # None where a run does not have it, or left it out


@dataclass(frozen=True, slots=True)
class Comparison:
    run_ids: tuple[int, ...]
    labels: tuple[str | None, ...]
    baseline: int  # run id
    metrics: tuple[MetricRow, ...]  # without those that no run has
    settings: tuple[SettingRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def compare_runs(runs: Sequence[ComparableRun], baseline: int | None = None) -> Comparison:
    """Compare finished runs with one of them.

    Args:
        runs: at least two, each once, all finished: half a run's figures say nothing about the other half.
        baseline: run id to compare with, by default the first's.

    Raises `ServeLabError` naming the run that cannot be compared.
    """
    run_ids = tuple(run.run_id for run in runs)
    _check(runs, run_ids)
    baseline = run_ids[0] if baseline is None else baseline
    if baseline not in run_ids:
        raise ServeLabError(f"baseline #{baseline} is not among the compared runs: {_names(run_ids)}")
    position = run_ids.index(baseline)
    rows = [_metric_row(metric, runs, position) for metric in _DIRECTIONS]
    return Comparison(
        run_ids=run_ids,
        labels=tuple(run.label for run in runs),
        baseline=baseline,
        metrics=tuple(row for row in rows if any(value is not None for value in row.values)),
        settings=_differing_settings(runs),
    )


def metric_value(summary: Mapping[str, Any] | None, metric: str) -> float | None:
    """A figure of a stored summary by its field, or by field and statistic: "duration_s", "ttft_ms.p50"."""
    field, _, statistic = metric.partition(".")
    value = (summary or {}).get(field)
    return value.get(statistic) if statistic and isinstance(value, Mapping) else value


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check(runs: Sequence[ComparableRun], run_ids: tuple[int, ...]) -> None:
    if len(runs) < 2:
        raise ServeLabError("comparing takes at least two runs")
    repeated = sorted({run_id for run_id in run_ids if run_ids.count(run_id) > 1})
    if repeated:
        raise ServeLabError(f"{_names(repeated)} given more than once; name each run once")
    for run in runs:
        if run.kind == "certificate":
            raise ServeLabError(f"run #{run.run_id} is a certificate of speculation; it has no figures to compare")
        if run.kind != "serve":
            lab, page = _LABS[run.kind]
            raise ServeLabError(f"run #{run.run_id} is the {lab} lab's; the {page} page compares such runs")
        if run.status != "finished" or run.summary is None:
            raise ServeLabError(f"run #{run.run_id} is {run.status}; only finished runs can be compared")


def _metric_row(metric: str, runs: Sequence[ComparableRun], baseline: int) -> MetricRow:
    values = tuple(metric_value(run.summary, metric) for run in runs)
    higher_is_better = _DIRECTIONS[metric]
    reference = values[baseline]
    differences: list[float | None] = []
    verdicts: list[Verdict | None] = []
    for index, value in enumerate(values):
        if value is None or reference is None or index == baseline:
            differences.append(None)
            verdicts.append(None)
        else:
            differences.append((value - reference) / abs(reference) if reference else None)
            verdicts.append(_verdict(value, reference, higher_is_better))
    return MetricRow(metric, higher_is_better, values, tuple(differences), tuple(verdicts))


def _verdict(value: float, reference: float, higher_is_better: bool | None) -> Verdict | None:
    if higher_is_better is None:
        return None
    if math.isclose(value, reference, rel_tol=_SMALLEST_DIFFERENCE, abs_tol=1e-12):
        return "equal"
    return "better" if (value > reference) == higher_is_better else "worse"


def _differing_settings(runs: Sequence[ComparableRun]) -> tuple[SettingRow, ...]:
    # What was asked and what was made of it differ between machines: compare like with like.
    resolved = all(run.resolved_config for run in runs)
    flat: list[dict[str, Any]] = []
    for run in runs:
        config = run.resolved_config if resolved else run.config
        flat.append(flatten(config or {}) | flatten(run.workload, "workload."))
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = (SettingRow(key, tuple(settings.get(key) for settings in flat)) for key in keys)
    return tuple(row for row in rows if any(value != row.values[0] for value in row.values[1:]))


def _names(run_ids: Sequence[int]) -> str:
    return ", ".join(f"#{run_id}" for run_id in run_ids)
