"""Priorities through a whole run: workload, queue, engine, database, figures. Latencies are counted in steps."""

from __future__ import annotations

import csv
import io
import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cli import main
from app.services import Services
from backend.engine.engine_host import EngineHost
from backend.engine.in_process_target import InProcessTarget
from backend.experiments.run_queue import RunQueue
from backend.sampling_params import SamplingParams
from backend.workload.datasets import build_requests
from backend.workload.spec import Workload
from backend.workload.targets import Prompt, StreamEvent
from db.export import export_runs
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.run_rows import Row, Run
from db.session import Database
from tests.engine.driving import Answer, config_of
from tests.waiting import PATIENCE_S

NUM_REQUESTS, OUTPUT_LEN = 12, 5


@pytest.fixture
def repository() -> Iterator[RunRepository]:
    database = Database.open()
    yield RunRepository(database)
    database.close()


class AllWaiting(InProcessTarget):
    """Holds the engine up until all requests of a workload are there: who is served first is then the policy's choice."""

    def __init__(self, host: EngineHost, num_prompts: int) -> None:
        super().__init__(host)
        self._left = num_prompts
        self._all_there = threading.Event()
        host._put(lambda: self._check(self._all_there.wait(PATIENCE_S)))

    def _check(self, there: bool) -> None:
        assert there, "not all requests came"

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Callable[[StreamEvent], None],
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        super().submit(request_id, prompt, sampling, on_event, arrival_time, priority)
        self._left -= 1
        if not self._left:
            self._all_there.set()


def workload(**changes: Any) -> Workload:
    return Workload.from_dict(
        {
            "source": {"kind": "synthetic", "num_requests": NUM_REQUESTS, "prompt_len": 6},
            "output_len": OUTPUT_LEN,
            "sampling": {"ignore_eos": True},
            "warmup_requests": 0,
            "priorities": {"0": 1.0, "1": 1.0, "2": 1.0},
            **changes,
        }
    )


def record(repository: RunRepository, tiny_llama: Path, spec: Workload, **settings: Any) -> Run:
    """Run it with one request at a time, all of them waiting from the start."""
    config = config_of(tiny_llama, scheduler__max_num_seqs=1, **settings)
    run_id = repository.create(config.to_dict(), spec.to_dict())
    recorder = RunRecorder(repository._database, run_id)
    host = EngineHost()
    queue = RunQueue(
        host, ensure_model=lambda name, on_progress: None, make_target=lambda host: AllWaiting(host, NUM_REQUESTS)
    )
    try:
        queue.submit(run_id, config, spec, [recorder])
        end = queue.wait(run_id, PATIENCE_S)
    finally:
        queue.close()
        host.close()
        recorder.close()
    assert end is not None
    assert (end.status, end.error) == ("finished", None)
    run = repository.get(run_id)
    assert run is not None
    return run


def first_steps(repository: RunRepository, run_id: int) -> dict[str, int]:
    """In which step each request's first token came, counted from 1."""
    ends = [end for _, _, end in repository.step_times(run_id)]
    rows = repository.requests(run_id)
    return {row["request_id"]: bisect_left(ends, row["emission_times"][0]) + 1 for row in rows}


def test_the_lowest_number_is_served_first_and_fcfs_heeds_none(repository: RunRepository, tiny_llama: Path) -> None:
    """One slot and a queue: the k-th to be served waits for k answers of five steps each, and gets its token in one more."""
    spec = workload()
    asked = {request.index: request.priority for request in build_requests(spec, 512)}
    assert sorted(set(asked.values())) == [0, 1, 2]
    by_arrival = sorted(asked)
    by_priority = sorted(asked, key=lambda index: (asked[index], index))
    assert by_priority != by_arrival
    means: dict[str, list[float]] = {}
    for policy, served in (("priority", by_priority), ("fcfs", by_arrival)):
        run = record(repository, tiny_llama, spec, scheduler__policy=policy)
        steps = first_steps(repository, run.run_id)
        assert steps == {f"run{run.run_id}-{index}": k * OUTPUT_LEN + 1 for k, index in enumerate(served)}
        means[policy] = [
            float(np.mean([steps[f"run{run.run_id}-{index}"] for index in asked if asked[index] == number]))
            for number in (0, 1, 2)
        ]
        notices = [notice for notice in run.notices if "priorities" in notice]
        assert notices == (
            []
            if policy == "priority"
            else ["workload.priorities are not heeded: scheduler.policy is 'fcfs', and only 'priority' does"]
        )
        check_figures(repository, run, asked)
    ours, theirs = means["priority"], means["fcfs"]
    assert ours[0] < ours[1] < ours[2]
    assert ours[0] < theirs[0]
    assert ours[2] > theirs[2]


def check_figures(repository: RunRepository, run: Run, asked: dict[int, int]) -> None:
    """Records, summary, JSON and CSV say the same of each class."""
    rows: list[Row] = repository.requests(run.run_id)
    assert {row["index"]: row["priority"] for row in rows} == asked
    assert run.summary is not None
    classes = run.summary["ttft_ms_by_priority"]
    assert list(classes) == ["0", "1", "2"]
    for number, figures in classes.items():
        sample = [row["ttft_ms"] for row in rows if row["priority"] == int(number)]
        assert figures["count"] == len(sample)
        assert [figures[name] for name in ("p50", "p99")] == pytest.approx(np.percentile(sample, (50, 99)))
    (document,) = json.loads(export_runs(repository, [run.run_id], "json"))
    assert document["summary"]["ttft_ms_by_priority"] == classes
    assert [request["priority"] for request in document["requests"]] == list(asked.values())
    assert document["workload"]["priorities"] == {"0": 1.0, "1": 1.0, "2": 1.0}
    for table, column, expected in (
        ("requests", "priority", [str(number) for number in asked.values()]),
        ("runs", "summary.ttft_ms_by_priority.2.p99", [repr(classes["2"]["p99"])]),
    ):
        exported = export_runs(repository, [run.run_id], "csv", table)  # type: ignore[arg-type]
        assert [row[column] for row in csv.DictReader(io.StringIO(exported.decode()))] == expected


def test_samples_have_their_prompts_priority(repository: RunRepository, tiny_llama: Path) -> None:
    spec = workload(sampling={"ignore_eos": True, "n": 2, "temperature": 1.0})
    run = record(repository, tiny_llama, spec, scheduler__policy="priority")
    steps, rows = first_steps(repository, run.run_id), repository.requests(run.run_id)
    assert [(row["index"], row["request_id"][-2:]) for row in rows] == [
        (index, f"/{sample}") for index in range(NUM_REQUESTS) for sample in (0, 1)
    ]
    assert {row["parent_id"] for row in rows} == {f"run{run.run_id}-{index}" for index in range(NUM_REQUESTS)}
    served = sorted(rows, key=lambda row: steps[row["request_id"]])
    numbers = [row["priority"] for row in served]
    assert numbers == sorted(numbers)
    assert run.num_requests == 2 * NUM_REQUESTS
    assert run.summary is not None
    assert (run.summary["num_requests"], run.summary["output_tokens"]) == (24, 24 * OUTPUT_LEN)
    assert run.summary["input_tokens"] == NUM_REQUESTS * 6
    assert sum(figures["count"] for figures in run.summary["ttft_ms_by_priority"].values()) == 24


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_a_request_starves_while_better_ones_keep_coming(host: EngineHost, tiny_llama: Path, policy: str) -> None:
    """Each of six better ones brings the next along before it ends. The poor one waits for the last, and is then served."""
    host.load(config_of(tiny_llama, scheduler__max_num_seqs=1, scheduler__policy=policy))
    ended: list[str] = []
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    poor, last = Answer(), Answer()

    def chain(number: int) -> Callable[[StreamEvent], None]:
        is_first_event = True

        def listen(event: StreamEvent) -> None:
            nonlocal is_first_event
            if is_first_event and number < 6:
                host.submit(f"better-{number + 1}", [1, 2, 3], sampling, chain(number + 1), priority=-1)
            is_first_event = False
            if event.finish_reason is not None:
                ended.append(event.request_id)
            if number == 6:
                last.take(event)

        return listen

    def listen(event: StreamEvent) -> None:
        if event.finish_reason is not None:
            ended.append(event.request_id)
        poor.take(event)

    def both() -> None:
        host._add("better-1", [1, 2, 3], sampling, chain(1), 1.0, -1)
        host._add("poor", [1, 2, 3], sampling, listen, 1.0, 0)

    host._call(both)
    assert (last.finish_reason, poor.finish_reason) == ("length", "length")
    better = [f"better-{number}" for number in range(1, 7)]
    assert ended == ([*better, "poor"] if policy == "priority" else [better[0], "poor", *better[1:]])


def test_the_command_line_sets_priorities(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    submit = EngineHost.submit

    def watched(self: EngineHost, *arguments: Any, **named: Any) -> None:
        asked.append(arguments[5])
        submit(self, *arguments, **named)

    monkeypatch.setattr(EngineHost, "submit", watched)
    model = ["--set", f"model.name={tiny_llama}", "--set", "model.device=cpu"]
    assert main(["generate", "hi", *model, "--max-tokens", "1", "--priority", "-7"]) == 0
    assert asked == [-7]
    said = "note: --priority is not heeded: scheduler.policy is 'fcfs', and only 'priority' does\n"
    assert said in capsys.readouterr().err
    assert (
        main(["generate", "hi", *model, "--max-tokens", "1", "--priority", "1", "--set", "scheduler.policy=priority"])
        == 0
    )
    assert "heeded" not in capsys.readouterr().err

    source = ["--set", "workload.source.kind=synthetic", "--set", "workload.source.num_requests=8"]
    arguments = [*source, "--set", "workload.output_len=2", "--set", "workload.priorities={0 = 1, 9 = 1}"]
    assert main(["run", *model, *arguments, "--set", "scheduler.policy=priority", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["summary"]["ttft_ms_by_priority"]) == ["0", "9"]
    assert main(["runs", "show", str(document["run_id"])]) == 0
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if "priority" in line and line.startswith("TTFT")] == [
        f"TTFT of priority {number}, {quantile}" for number in (0, 9) for quantile in ("p50", "p99")
    ]
    with Services.open() as services:
        stored = services.repository.requests(document["run_id"])
    assert {row["priority"] for row in stored if not row["warmup"]} == {0, 9}
