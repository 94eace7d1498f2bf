"""All eight methods on the default model, from the page's button through the run queue to the export."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import resources
from app.components.quantization_form import RUN
from app.run_export import export_stored_runs
from app.services import Services
from backend.experiments import quantization_checkpoints
from backend.models.sources import ModelSource
from tests.app.pages import page, press

METHODS = ["int8", "w8a8_int8", "llm_int8", "fp8", "int4", "gptq", "awq", "nf4"]
TOKENS = 300
# Of codes, without scales and zero points, which take less than a bit.
BITS = dict.fromkeys(METHODS, 8) | dict.fromkeys(("int4", "gptq", "awq", "nf4"), 4)
NUMBERS = (
    "bits_per_weight",
    "weights_bytes",
    "perplexity",
    "kl_mean",
    "kl_max",
    "top1_agreement",
    "delta_p",
    "measure_s",
)


@pytest.fixture
def services(smollm2: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """With an engine, behind the pages; checkpoints are the test's own, beside the model that the machine has."""
    assert smollm2.path is not None
    models = tmp_path / "home" / "models"
    models.mkdir(parents=True)
    (models / smollm2.path.name).symlink_to(smollm2.path)
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    # gptq and awq calibrate on 128 tokens.
    monkeypatch.setattr(quantization_checkpoints, "NUM_WINDOWS", 2)
    monkeypatch.setattr(quantization_checkpoints, "WINDOW_LENGTH", 64)
    with Services.open() as services:
        resources.install(services)
        yield services
        resources.install(None)


@pytest.mark.slow
def test_all_methods_end_as_an_export_with_a_row_for_each(services: Services) -> None:
    app = page("quantization")
    assert app.selectbox(key="quantization-model").value == "smollm2-135m"
    app.multiselect[0].set_value(METHODS).run()
    app.number_input(key="quantization-tokens").set_value(TOKENS).run()
    app.toggle(key="quantization-speed").set_value(False).run()  # an engine for each takes longer than all the rest
    press(app, "Measure")
    run_id = app.session_state[RUN]
    end = services.queue.wait(run_id)
    assert end is not None
    assert (end.status, end.error) == ("finished", None)
    (run,) = services.repository.get_all([run_id])
    assert (run.kind, run.status, run.config["variants"]) == ("quantization", "finished", METHODS)

    (document,) = json.loads(export_stored_runs(services, [run_id], "json"))
    reference, *rows = document["quantization"]
    assert document["status"] == "finished"
    assert (reference["variant"], reference["bits_per_weight"]) == ("reference", 32)
    assert [row["variant"] for row in rows] == METHODS
    for row in rows:
        assert row["problem"] is None
        assert all(math.isfinite(row[name]) for name in NUMBERS), row
        assert BITS[row["variant"]] < row["bits_per_weight"] < BITS[row["variant"]] + 1
        assert row["num_tokens"] == reference["num_tokens"] == TOKENS - 1
        assert row["weights_bytes"] < reference["weights_bytes"]
        # Eight bits lose far less than four; none is the reference itself, and none is in ruins.
        assert 0 < row["kl_mean"] < (0.1 if BITS[row["variant"]] == 8 else 1)
        assert len(row["layers"]) == 30 * 4
        assert all(0 < layer["output_error"] < 1 for layer in row["layers"])
    assert len({row["perplexity"] for row in (reference, *rows)}) == 9

    table = list(csv.DictReader(io.StringIO(export_stored_runs(services, [run_id], "csv").decode())))
    assert [row["variant"] for row in table] == ["reference", *METHODS]
    for shown, row in zip(table[1:], rows, strict=True):
        assert {name: float(shown[name]) for name in NUMBERS} == {name: row[name] for name in NUMBERS}
