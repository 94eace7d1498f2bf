from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import psutil
import pytest
from sqlalchemy import text, update

from backend.errors import DatabaseError
from backend.metrics.stats import RequestStats, StepStats, TelemetrySample
from db.models import ChunkRow, RequestRow, RunRow, SampleRow, StepRow
from db.repository import INTERRUPTED_ERROR, RunRepository
from db.run_rows import Run, chunk_row, request_row, sample_row, step_row
from db.session import Database
from tests.db.records import CONFIG, WORKLOAD, make_request, make_sample, make_step


def get(repository: RunRepository, run_id: int) -> Run:
    run = repository.get(run_id)
    assert run is not None
    return run


def set_columns(database: Database, run_id: int, **values: object) -> None:
    with database.write() as session:
        session.execute(update(RunRow).where(RunRow.run_id == run_id).values(values))


def add_steps(repository: RunRepository, run_id: int, steps: list[StepStats]) -> None:
    repository.record(run_id, {}, {StepRow: [step_row(run_id, step, 100.0) for step in steps]})


def test_a_new_run_is_queued_and_belongs_to_this_process(repository: RunRepository) -> None:
    run = get(repository, repository.create(CONFIG, WORKLOAD, label="first", notes="a note"))
    assert (run.run_id, run.status, run.label, run.notes, run.model) == (1, "queued", "first", "a note", "tiny")
    assert (run.config, run.workload) == (CONFIG, WORKLOAD)
    assert run.owner.is_this_process
    assert (run.owner_host, run.owner_pid) == (socket.gethostname(), os.getpid())
    assert abs(run.owner_started - psutil.Process().create_time()) < 1
    unknown = (run.started_at, run.ended_at, run.resolved_config, run.summary, run.error, run.num_requests, run.phase)
    assert unknown == (None,) * 7
    assert run.notices == []
    assert (run.title, repository.get(99)) == ("#1 first", None)


def test_every_field_of_a_record_has_a_column() -> None:
    for record, table in ((StepStats, StepRow), (RequestStats, RequestRow), (TelemetrySample, SampleRow)):
        assert {field.name for field in fields(record)} <= set(table.__table__.columns.keys())


def test_ids_are_never_used_again(repository: RunRepository) -> None:
    first, second = (repository.create(CONFIG, WORKLOAD) for _ in range(2))
    repository.record(second, {"status": "finished"}, {})
    repository.delete([second])
    assert repository.create(CONFIG, WORKLOAD) == second + 1 == first + 2


def test_list_is_newest_first_and_filters(repository: RunRepository) -> None:
    other = {"model": {"name": "Llama_8B"}}
    ids = [
        repository.create(CONFIG, WORKLOAD, label="baseline"),
        repository.create(other, WORKLOAD, label="100% sure", notes="see run 1"),
        repository.create(other, WORKLOAD, notes="Baseline again"),
    ]
    repository.record(ids[1], {"status": "finished"}, {})

    def listed(**filters: object) -> list[int]:
        return [run.run_id for run in repository.list(**filters)]  # type: ignore[arg-type]

    assert listed() == [3, 2, 1]
    assert listed(limit=2) == [3, 2]
    assert listed(text="BASELINE") == [3, 1], "label and notes, in any case"
    assert listed(text=" llama_8b ") == [3, 2], "the model's name"
    assert listed(text="#1") == [1], "an id and nothing else"
    assert listed(text="1") == [2, 1], "an id, or text that contains it"
    assert listed(text="%") == listed(text="100%") == [2], "no wildcards"
    assert listed(text="_") == [3, 2]
    assert listed(text="#label") == listed(text="#") == listed(text="²") == []
    assert listed(text="9" * 40) == []
    assert listed(statuses=["finished", "failed"]) == [2]
    assert listed(statuses=[]) == []
    assert listed(models=["Llama_8B"], statuses=["queued"], text="again") == [3]
    assert repository.models() == ["Llama_8B", "tiny"]


def test_label_and_notes(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    repository.set_label(run_id, "=1+1")
    repository.set_notes(run_id, "two\nlines")
    assert (get(repository, run_id).label, get(repository, run_id).notes) == ("=1+1", "two\nlines")
    repository.set_label(run_id, "")
    repository.set_notes(run_id, None)
    assert (get(repository, run_id).label, get(repository, run_id).notes) == (None, None)
    with pytest.raises(DatabaseError, match="no run #7"):
        repository.set_label(7, "x")


def test_deleting_a_run_deletes_its_records_and_no_others(database: Database, repository: RunRepository) -> None:
    ids = [repository.create(CONFIG, WORKLOAD) for _ in range(3)]
    for run_id in ids:
        rows = {
            RequestRow: [request_row(run_id, make_request(0), 100.0)],
            StepRow: [step_row(run_id, make_step(0), 100.0)],
            SampleRow: [sample_row(run_id, make_sample(101.0), 100.0)],
            ChunkRow: [chunk_row(run_id, "steps", b"x", 0, 0)],
        }
        repository.record(run_id, {"status": "finished"}, rows)
    repository.delete([1, 3])
    assert [run.run_id for run in repository.list()] == [2]
    with database.read() as session:
        for table in ("requests", "steps", "samples", "chunks"):
            assert session.scalars(text(f"SELECT run_id FROM {table}")).all() == [2]


def test_a_live_run_is_not_deleted(database: Database, repository: RunRepository) -> None:
    done, live = (repository.create(CONFIG, WORKLOAD) for _ in range(2))
    repository.record(done, {"status": "finished"}, {})
    with pytest.raises(DatabaseError, match=rf"run #2 is queued \(process {os.getpid()} on .*cancel it first"):
        repository.delete([done, live])
    with pytest.raises(DatabaseError, match="no run #8, #9"):
        repository.delete([done, 9, 8])
    assert len(repository.list()) == 2, "all or none"
    set_columns(database, live, owner_host="elsewhere")
    with pytest.raises(DatabaseError, match="on elsewhere"):
        repository.delete([live])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="without /proc less is known of a process")
def test_only_runs_whose_process_has_ended_are_interrupted(
    database: Database, repository: RunRepository, url: str
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    cases = {
        "mine": {},
        "gone": {"owner_pid": gone.pid},
        "gone, id in use again": {"owner_start_ticks": 1, "owner_started": psutil.Process().create_time() - 60},
        "gone with the machine": {"owner_boot_id": "an earlier boot"},
        "another machine's": {"owner_pid": gone.pid, "owner_host": "elsewhere"},
        "another container's": {"owner_pid": gone.pid, "owner_pid_namespace": 1},
        "mine, and the clock was set": {"owner_started": psutil.Process().create_time() - 3600},
        "gone, but over": {"owner_pid": gone.pid, "status": "cancelled"},
        "gone while running": {"owner_pid": gone.pid, "status": "running", "phase": {"name": "running", "done": 3}},
    }
    ids = {label: repository.create(CONFIG, WORKLOAD, label) for label in cases}
    for label, values in cases.items():
        if values:
            set_columns(database, ids[label], **values)
    Database.open(url).close()
    interrupted = {run.label: run for run in repository.list(statuses=["interrupted"])}
    assert set(interrupted) == {"gone", "gone, id in use again", "gone with the machine", "gone while running"}
    assert {run.error for run in interrupted.values()} == {INTERRUPTED_ERROR}
    assert interrupted["gone while running"].phase is None
    assert get(repository, ids["gone, but over"]).status == "cancelled"
    assert repository.mark_interrupted() == []
    repository.delete([ids["gone"]])


def test_a_deleted_orphan_need_not_be_interrupted_first(database: Database, repository: RunRepository) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    run_id = repository.create(CONFIG, WORKLOAD)
    set_columns(database, run_id, owner_pid=process.pid)
    repository.delete([run_id])
    assert repository.list() == []


def test_a_final_status_is_never_left(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    repository.record(run_id, {"status": "cancelled", "error": "by the user"}, {})
    repository.record(run_id, {"status": "running", "error": None}, {StepRow: [step_row(run_id, make_step(0), 100.0)]})
    run = get(repository, run_id)
    assert (run.status, run.error) == ("cancelled", "by the user")
    assert len(repository.steps(run_id)) == 1, "records are kept all the same"


def test_runs_are_counted_and_fetched_in_the_order_asked_for(repository: RunRepository) -> None:
    assert repository.count() == 0
    ids = [repository.create(CONFIG, WORKLOAD) for _ in range(3)]
    assert repository.count() == 3
    assert [run.run_id for run in repository.get_all([ids[2], ids[0]])] == [ids[2], ids[0]]
    with pytest.raises(DatabaseError, match="no run #9; `servelab runs list`"):
        repository.get_all([ids[0], 9])


def test_requests_are_relative_to_the_start_and_carry_their_latencies(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    stats = [
        make_request(1, status="failed", finish_reason="error", error="boom", emission_times=(), emission_tokens=(),
                     num_output_tokens=0, scheduled_time=None, text=None, token_ids=None),
        make_request(0),
        make_request(0, request_id="w", warmup=True),
        make_request(2, num_output_tokens=1, emission_times=(102.0,), emission_tokens=(1,)),
    ]  # fmt: skip
    repository.record(run_id, {}, {RequestRow: [request_row(run_id, item, 100.0) for item in stats]})
    rows = repository.requests(run_id)
    assert [(row["warmup"], row["index"]) for row in rows] == [(True, 0), (False, 0), (False, 1), (False, 2)]
    whole, failed, short = rows[1:]
    assert whole == asdict(make_request(0)) | {
        "run_id": run_id,
        "arrival_time": 1.0,
        "scheduled_time": 1.5,
        "finish_time": 2.5,
        "emission_times": [2.0, 2.1, 2.4],
        "emission_tokens": [1, 2, 1],
        "token_ids": [5, 6, 7, 8],
        "queue_ms": pytest.approx(500),
        "prefill_ms": pytest.approx(500),
        "ttft_ms": pytest.approx(1000),
        "tpot_ms": pytest.approx(400 / 3),
        "e2el_ms": pytest.approx(1400),
    }
    missing = ("scheduled_time", "queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "e2el_ms", "text", "token_ids")
    assert [failed[name] for name in missing] == [None] * len(missing)
    assert failed["error"] == "boom"
    assert (short["ttft_ms"], short["tpot_ms"]) == (pytest.approx(1000), None)


def test_times_of_requests_leave_out_what_grows_with_their_tokens(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    stats = [make_request(1), make_request(0), make_request(0, request_id="w", warmup=True)]
    repository.record(run_id, {}, {RequestRow: [request_row(run_id, item, 100.0) for item in stats]})
    long = {"emission_times", "emission_tokens", "prompt", "text", "token_ids"}
    expected = [{key: row[key] for key in row.keys() - long} for row in repository.requests(run_id)]
    assert repository.request_times(run_id) == expected
    assert [row["request_id"] for row in expected] == ["w", "r0", "r1"]
    assert repository.emission_times(run_id, "r1") == [2.0, 2.1, 2.4]
    assert repository.emission_times(run_id, "r9") == repository.emission_times(run_id + 1, "r1") == []


def test_tokens_of_requests_in_the_order_in_which_they_were_stored(repository: RunRepository) -> None:
    run_id, other = (repository.create(CONFIG, WORKLOAD) for _ in range(2))
    for index in (1, 0):
        stats = make_request(index, prompt="hello", token_ids=(4, 5), num_prompt_tokens=3)
        repository.record(run_id, {}, {RequestRow: [request_row(run_id, stats, 100.0)]})
    rows = repository.request_tokens(run_id)
    assert [row["request_id"] for row in rows] == ["r1", "r0"]
    for row in rows:
        assert (row["prompt"], row["token_ids"], row["num_prompt_tokens"]) == ("hello", [4, 5], 3)
    assert repository.request_tokens(run_id, after=rows[0]["row_id"]) == rows[1:]
    assert repository.request_tokens(run_id, after=rows[1]["row_id"]) == repository.request_tokens(other) == []


def test_times_of_steps(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    add_steps(repository, run_id, [make_step(2), make_step(0), make_step(1, duration_ms=float("nan")), make_step(3)])
    times = repository.step_times(run_id)
    assert [step for step, _, _ in times] == [0, 2, 3], "one was not timed"
    assert times[1] == (2, pytest.approx(1.0 - 0.02), pytest.approx(1.0))
    assert repository.step_times(run_id, from_step=1) == times[1:]


def test_steps_one_by_one(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    steps = [make_step(1, duration_ms=float("nan")), make_step(0, num_free_blocks=0, num_evictable_blocks=0)]
    add_steps(
        repository, run_id, [*steps, make_step(2, num_referenced_blocks=0, num_evictable_blocks=0, num_free_blocks=0)]
    )
    rows = repository.steps(run_id)
    assert rows[0] == asdict(steps[1]) | {"run_id": run_id, "end_time": 0.5, "num_steps": 1, "kv_cache_usage": 1.0}
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["duration_ms"] is None, "NaN is no measurement"
    assert (rows[1]["kv_cache_usage"], rows[2]["kv_cache_usage"]) == (10 / 64, 0.0)
    assert repository.steps(run_id, max_points=3) == rows


def test_thinned_steps_keep_sums_peaks_and_means(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    steps = [
        make_step(i, num_output_tokens=i, num_running=i % 5, duration_ms=float(i % 7), num_referenced_blocks=i % 40,
                  num_free_blocks=58 - i % 40, num_preempted=i % 2)
        for i in range(1000)
    ]  # fmt: skip
    add_steps(repository, run_id, steps)
    rows = repository.steps(run_id, max_points=100)
    assert len(rows) == 63, "the most that a power of two leaves"
    assert set(rows[0]) == set(repository.steps(run_id)[0])
    for row, first in zip(rows, range(0, 1000, 16), strict=True):
        bucket = steps[first : first + 16]
        assert row["step"] == first
        assert row["num_steps"] == len(bucket)
        assert row["end_time"] == bucket[-1].end_time - 100.0
        assert row["num_output_tokens"] == sum(step.num_output_tokens for step in bucket)
        assert row["num_preempted"] == sum(step.num_preempted for step in bucket)
        assert row["num_running"] == max(step.num_running for step in bucket)
        assert row["duration_ms"] == pytest.approx(sum(step.duration_ms for step in bucket) / len(bucket))
        assert row["kv_cache_usage"] == pytest.approx(max(step.kv_cache_usage for step in bucket))
        blocks = row["num_referenced_blocks"] + row["num_evictable_blocks"] + row["num_free_blocks"]
        assert blocks == pytest.approx(64)
    assert sum(row["num_steps"] for row in rows) == 1000


def test_points_stay_where_they_are_while_a_run_grows(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    add_steps(repository, run_id, [make_step(i) for i in range(520)])
    before = repository.steps(run_id, max_points=64)
    add_steps(repository, run_id, [make_step(i) for i in range(520, 700)])
    after = repository.steps(run_id, max_points=64)
    assert before[:-1] == after[: len(before) - 1]


@pytest.mark.parametrize("max_points", [1, 2, 3, 7, 99, 100, 101])
def test_there_are_never_more_points_than_asked_for(repository: RunRepository, max_points: int) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    assert repository.steps(run_id, max_points) == []
    add_steps(repository, run_id, [make_step(i) for i in range(37, 137)])
    assert 1 <= len(repository.steps(run_id, max_points)) <= max_points


def test_samples_and_chunks_come_in_order(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    rows = {
        SampleRow: [sample_row(run_id, make_sample(time), 100.0) for time in (102.0, 101.0)],
        ChunkRow: [
            chunk_row(run_id, "steps", b"\x00\xff", 256, 300),
            chunk_row(run_id, "steps", b"first", 0, 255),
            chunk_row(run_id, "blocks", b"other", 0, 9),
        ],
    }
    repository.record(run_id, {}, rows)
    assert repository.samples(run_id)[0] == asdict(make_sample(1.0)) | {"run_id": run_id}
    assert [row["time"] for row in repository.samples(run_id)] == [1.0, 2.0]
    assert repository.chunks(run_id, "steps") == [(b"first", 0, 255), (b"\x00\xff", 256, 300)]
    assert [first for _, first, _ in repository.chunks(run_id, "steps", from_step=255)] == [0, 256]
    assert [first for _, first, _ in repository.chunks(run_id, "steps", from_step=256)] == [256]
    assert repository.chunks(run_id, "steps", from_step=301) == []
    assert repository.chunks(run_id, "none of these") == repository.samples(99) == []


def test_kernel_runs_are_told_apart_and_keep_their_results(repository: RunRepository) -> None:
    serving = repository.create(CONFIG, WORKLOAD)
    lab = repository.create({"experiments": ["check"]}, {}, kind="kernels")
    what = {"experiment": "check", "op": "rms_norm", "implementation": "launch", "shape": "default", "dtype": "float32"}
    for passed, error in ((True, 1e-7), (False, float("nan"))):
        repository.add_kernel_result(lab, what | {"passed": passed, "max_abs_error": error, "of no column": 1})
    assert [(row["passed"], row["max_abs_error"]) for row in repository.kernel_results(lab)] == [
        (True, 1e-7),
        (False, None),
    ]
    assert [run.run_id for run in repository.list(kind="kernels")] == [lab]
    assert [run.run_id for run in repository.list(kind="serve")] == [serving]
    assert [run.run_id for run in repository.list()] == [lab, serving]
    assert repository.models() == ["tiny"]
    repository.record(lab, {"status": "finished"}, {})
    repository.delete([lab])
    assert repository.kernel_results(lab) == []
    with pytest.raises(DatabaseError, match="was deleted while it ran"):
        repository.add_kernel_result(lab, what)


def test_quantization_runs_have_their_model_and_keep_their_results(repository: RunRepository) -> None:
    lab = repository.create({"model": "dummy:tiny", "variants": ["int8"]}, {}, kind="quantization")
    layers = [{"layer": 0, "kind": "qkv", "output_error": 0.1, "largest_channels": [{"channel": 7, "ratio": None}]}]
    repository.add_quantization_result(
        lab, {"variant": "reference", "perplexity": 12.5, "emulated": False, "weights_bytes": 2**40, "of no column": 1}
    )
    repository.add_quantization_result(
        lab, {"variant": "int8", "kl_mean": float("inf"), "layers": layers, "settings": {"cache": {"dtype": "int4"}}}
    )
    reference, int8 = repository.quantization_results(lab)
    assert (reference["variant"], reference["perplexity"], reference["emulated"]) == ("reference", 12.5, False)
    assert (reference["weights_bytes"], reference["layers"], reference["part"]) == (2**40, None, None)
    assert (int8["kl_mean"], int8["layers"], int8["settings"]) == (None, layers, {"cache": {"dtype": "int4"}})
    (run,) = repository.list(kind="quantization", models={"dummy:tiny"})
    assert (run.run_id, run.model) == (lab, "dummy:tiny")
    assert repository.models() == ["dummy:tiny"]
    assert repository.kernel_results(lab) == []
    repository.record(lab, {"status": "finished"}, {})
    repository.delete([lab])
    assert repository.quantization_results(lab) == []
    with pytest.raises(DatabaseError, match="was deleted while it ran"):
        repository.add_quantization_result(lab, {"variant": "int8"})
