"""Exports: foreign text is no formula, and numbers stay numbers (roboflow/inference#2578, Countly/countly-server#7877)."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pandas as pd
import pytest

from backend.errors import DatabaseError
from backend.metrics.stats import summary_to_dict
from db.export import export_runs, spreadsheet_safe
from db.models import RequestRow, StepRow
from db.repository import RunRepository
from db.run_rows import request_row, step_row
from tests.db.records import CONFIG, WORKLOAD, make_request, make_step, make_summary

FOREIGN_TEXTS = [
    "=1+1",
    "@x",
    "-2+3",
    "+y",
    "\ttab first",
    "\rreturn first",
    "\nline first",
    "＝1＋1",
    "＠x",
    "－1",
    "'=already",
    "'plain quote",
    'quotes " and "", commas, and\nnew\r\nlines',
    "semi;colon",
    "-0.5",
    "1e-7",
    "emoji 🙂 and ünïcode",
    "",
    " =leading space",
]


def recovered(cell: str) -> str:
    """What a reader of the CSV does, as documented."""
    return cell[1:] if re.match(r"'+[=+\-@\t\r\n＝＋－＠]", cell) else cell


def read_csv(data: bytes, **options: Any) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(data), keep_default_na=False, na_values={}, **options)


@pytest.fixture
def run_id(repository: RunRepository) -> int:
    """A run whose requests hold foreign texts and awkward numbers."""
    run_id = repository.create(CONFIG | {"+y": "=2"}, WORKLOAD, label="=1+1", notes="\ttab")
    requests = [
        make_request(
            index, prompt=text, text=text, arrival_time=99.5, emission_times=(99.5 + 1e-7,), emission_tokens=(4,)
        )
        for index, text in enumerate(FOREIGN_TEXTS)
    ]
    rows = {
        RequestRow: [request_row(run_id, request, 100.0) for request in requests],
        StepRow: [step_row(run_id, make_step(step, duration_ms=1e-7 * (step + 1)), 100.0) for step in range(3)],
    }
    repository.record(run_id, {"status": "finished", "summary": summary_to_dict(make_summary())}, rows)
    return run_id


def test_csv_of_requests_reads_back(repository: RunRepository, run_id: int) -> None:
    data = export_runs(repository, [run_id], "csv")
    frame = read_csv(data, dtype={"prompt": str, "text": str})
    rows = repository.requests(run_id)
    assert len(frame) == len(rows) == len(FOREIGN_TEXTS)
    assert list(frame.columns) == [*rows[0], "synthetic"], "the columns of the table, run_id first"
    assert frame.columns[0] == "run_id"
    assert [recovered(cell) for cell in frame["prompt"]] == FOREIGN_TEXTS
    assert not [cell for cell in (*frame["prompt"], *frame["text"]) if re.match(r"[=+\-@\t\r\n＝＋－＠]", cell)]
    cells = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    for name in ("arrival_time", "ttft_ms", "e2el_ms", "num_output_tokens"):
        assert pd.api.types.is_numeric_dtype(frame[name]), name
        assert [float(cell[name]) for cell in cells] == [row[name] for row in rows], name
    assert frame["arrival_time"].tolist() == [-0.5] * len(rows), "a negative number stays a number"
    assert {cell["tpot_ms"] for cell in cells} == {""}, "what does not exist is an empty cell"
    assert frame["warmup"].tolist() == frame["synthetic"].tolist() == [False] * len(rows)
    assert [json.loads(cell) for cell in frame["token_ids"]] == [[5, 6, 7, 8]] * len(rows)


def test_text_that_is_harmless_is_left_alone() -> None:
    changed = {text for text in FOREIGN_TEXTS if spreadsheet_safe(text) != text}
    harmless = {
        "'plain quote",
        'quotes " and "", commas, and\nnew\r\nlines',
        "semi;colon",
        "1e-7",
        "",
        " =leading space",
    }
    assert changed == set(FOREIGN_TEXTS) - harmless - {"emoji 🙂 and ünïcode"}


def test_csv_of_steps_reads_back(repository: RunRepository, run_id: int) -> None:
    other = repository.create(CONFIG, WORKLOAD)
    data = export_runs(repository, [run_id, other], "csv", "steps")
    frame = read_csv(data)
    assert all(pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns)
    assert b",1e-07," in data
    cells = csv.DictReader(io.StringIO(data.decode(), newline=""))
    rows = list(cells)
    assert {row.pop("synthetic") for row in rows} == {"false"}
    assert [{name: float(cell) for name, cell in row.items()} for row in rows] == repository.steps(run_id)
    only_header = export_runs(repository, [other], "csv", "steps").decode()
    assert only_header.strip().split(",") == list(frame.columns)


def test_csv_of_runs_is_flat_and_joins_what_runs_have(repository: RunRepository, run_id: int) -> None:
    other = repository.create({"model": {"name": "b", "extra": {"deep": [1, "x"]}}}, WORKLOAD)
    frame = read_csv(export_runs(repository, [run_id, other], "csv", "runs"), dtype={"config.cache.block_size": str})
    assert len(frame) == 2
    assert frame.columns[0] == "run_id"
    first, second = frame.to_dict("records")
    assert (first["run_id"], second["run_id"]) == (run_id, other)
    assert (first["label"], first["notes"], first["config.cache.block_size"]) == ("'=1+1", "'\ttab", "16")
    assert float(first["summary.ttft_ms.p50"]) == 10.0
    assert (first["summary.goodput_req_s"], second["config.cache.block_size"]) == ("", "")
    assert (second["config.model.extra.deep"], second["status"]) == ('[1, "x"]', "queued")
    assert first["config.+y"] == "'=2"


def test_headers_are_made_safe_too(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    repository.record(run_id, {"summary": {"=x": 1, "＝y": {"z": -0.5}}}, {})
    header, values = csv.reader(io.StringIO(export_runs(repository, [run_id], "csv", "runs").decode(), newline=""))
    assert not [name for name in header if spreadsheet_safe(name) != name]
    cells = dict(zip(header, values, strict=True))
    assert (cells["summary.=x"], cells["summary.＝y.z"]) == ("1", "-0.5")


def test_json_holds_whole_runs_in_the_order_asked_for(repository: RunRepository, run_id: int) -> None:
    other = repository.create(CONFIG, WORKLOAD)
    document = json.loads(export_runs(repository, [other, run_id], "json"), parse_constant=pytest.fail)
    assert [run["run_id"] for run in document] == [other, run_id]
    run = repository.get(run_id)
    assert run is not None
    whole = document[1]
    assert whole["requests"] == repository.requests(run_id)
    assert whole["steps"] == repository.steps(run_id)
    assert whole["requests"][0]["prompt"] == "=1+1", "JSON needs no prefix"
    assert (whole["summary"], whole["config"], whole["label"]) == (run.summary, run.config, "=1+1")
    assert whole["created_at"] == run.created_at.isoformat()
    assert whole["created_at"].endswith("+00:00")
    assert document[0]["requests"] == document[0]["steps"] == []


def test_json_of_one_table(repository: RunRepository, run_id: int) -> None:
    assert json.loads(export_runs(repository, [run_id], "json", "requests")) == repository.requests(run_id)
    assert json.loads(export_runs(repository, [run_id], "json", "steps")) == repository.steps(run_id)
    (flat,) = json.loads(export_runs(repository, [run_id], "json", "runs"))
    assert (flat["run_id"], flat["config.cache.block_size"], flat["summary.ttft_ms.p50"]) == (run_id, 16, 10.0)


def test_synthetic_runs_are_marked_and_others_are_not(repository: RunRepository, run_id: int) -> None:
    """In CSV by a column, in JSON by a key that other runs do not have."""
    other = repository.create(CONFIG, WORKLOAD)
    rows = {
        RequestRow: [request_row(other, make_request(0), 100.0)],
        StepRow: [step_row(other, make_step(0), 100.0)],
    }
    repository.record(other, {"status": "finished"}, rows)
    for table in ("requests", "steps", "runs"):
        data = export_runs(repository, [run_id, other], "csv", table, synthetic={other})
        cells = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
        marks = {(int(row["run_id"]), row["synthetic"]) for row in cells}
        assert marks == {(run_id, "false"), (other, "true")}, table
        document = json.loads(export_runs(repository, [run_id, other], "json", table, synthetic={other}))
        marks = {(row["run_id"], row.get("synthetic")) for row in document}
        assert marks == {(run_id, None), (other, True)}, table
        assert not any("synthetic" in row for row in document if row["run_id"] == run_id)
    whole = json.loads(export_runs(repository, [run_id, other], "json", synthetic={other}))
    assert "synthetic" not in whole[0]
    assert whole[1]["synthetic"] is True


def test_lone_surrogates_do_not_stop_an_export(repository: RunRepository) -> None:
    run_id = repository.create({"model": {"name": "m"}, "prompts": ["a\ud83db"], "\udc00": 1}, WORKLOAD, label="\ud83d")
    repository.record(run_id, {}, {RequestRow: [request_row(run_id, make_request(0, text="x\udfff"), 100.0)]})
    for table in ("runs", "requests", "steps"):
        export_runs(repository, [run_id], "csv", table).decode("utf-8")
        json.loads(export_runs(repository, [run_id], "json", table).decode("utf-8"))
    (whole,) = json.loads(export_runs(repository, [run_id], "json"))
    assert whole["config"]["prompts"] == ["a\ud83db"]
    assert whole["requests"][0]["text"] == "x\\udfff"


def test_an_unknown_run_is_named(repository: RunRepository, run_id: int) -> None:
    with pytest.raises(DatabaseError, match="no run #404"):
        export_runs(repository, [run_id, 404], "csv")
