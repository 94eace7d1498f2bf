"""What a run swapped, from its steps to every place that shows preemptions: only where there was something to show."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import resources
from app.cli import main
from app.services import Services
from tests.app.pages import page

LABELS = ("Preempted by swapping", "Swapped out", "Swapped in")
FIGURES = ("preemptions_swapped", "swapped_out_bytes", "swapped_in_bytes")
SMALL = ["--set", "model.name=dummy:tiny", "--set", "model.device=cpu"]
# Four requests of 24 tokens in the end, in a pool that holds two of them.
TIGHT = [
    *("--set", "cache.num_blocks=12", "--set", "cache.block_size=4", "--set", "cache.enable_prefix_caching=false"),
    *("--set", "workload.source.kind=synthetic", "--set", "workload.source.num_requests=4"),
    *("--set", "workload.source.prompt_len=8", "--set", "workload.output_len=16"),
    *("--set", "workload.sampling.ignore_eos=true"),
]


@pytest.fixture
def runs(capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """A run for each way to preempt, as its document."""
    documents = {}
    for preemption in ("swap", "recompute"):
        assert main(["run", *SMALL, *TIGHT, "--set", f"scheduler.preemption={preemption}", "--json"]) == 0
        documents[preemption] = json.loads(capsys.readouterr().out)
    services = Services.open()
    resources.install(services)
    yield documents
    resources.install(None)
    services.close()


def written(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_swapping_is_shown_wherever_preemptions_are(
    runs: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ids = {name: document["run_id"] for name, document in runs.items()}
    summaries = {name: document["summary"] for name, document in runs.items()}
    services = resources.get_services()
    steps = services.repository.steps(ids["swap"])
    swapped, out_bytes, in_bytes = (summaries["swap"][name] for name in FIGURES)
    assert swapped == sum(step["num_swapped"] for step in steps) > 0
    assert summaries["swap"]["preemptions"] >= swapped
    num_out, num_in = (sum(step[f"num_swapped_{way}_blocks"] for step in steps) for way in ("out", "in"))
    assert out_bytes + in_bytes == sum(step["swapped_bytes"] for step in steps)
    assert out_bytes * num_in == in_bytes * num_out, "blocks are of one size"
    assert num_in > 0
    assert summaries["recompute"]["preemptions"] > 0
    assert [summaries["recompute"][name] for name in FIGURES] == [None] * 3

    shown = {name: written(capsys, "runs", "show", run_id) for name, run_id in ids.items()}
    compared = written(capsys, "compare", ids["swap"], ids["recompute"])
    for label in LABELS:
        assert label in shown["swap"]
        assert label not in shown["recompute"]
        assert label in compared
    file = tmp_path / "runs.csv"
    written(capsys, "export", *ids.values(), "--format", "csv", "--table", "runs", "-o", file)
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [row["summary.swapped_out_bytes"] for row in rows] == [str(out_bytes), ""]

    for name, run_id in ids.items():
        detail = page("detail", run=str(run_id), view="All figures")
        named = [label for label in LABELS if label in list(detail.table[0].value["Figure"])]
        assert named == (list(LABELS) if name == "swap" else [])
        notes = [metric.delta for metric in detail.metric if metric.label == "Peak KV usage"]
        preemptions = summaries[name]["preemptions"]
        assert notes == [f"preemptions {preemptions}" + (f", {swapped} swapped" if name == "swap" else "")]
    figures = page("compare", runs=f"{ids['swap']},{ids['recompute']}").dataframe[0].value.set_index("Figure")
    assert [figures.loc[label].iloc[1] for label in LABELS] == ["–"] * 3
