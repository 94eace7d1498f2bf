"""The engine's benchmark on the CPU: its arithmetic against closed forms, one run of a tiny model, and the README's table."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from backend.config import EngineConfig
from backend.experiments.flight import Flight
from benchmarks import engine, idle, table
from benchmarks.figures import Figure, attempt
from benchmarks.limits import CardLimits
from benchmarks.long_context import torch_attention, torch_inputs
from benchmarks.model_figures import IDLE_OUTPUT_LEN, decode_rate, mix_rate, prefill_rate
from benchmarks.passes import BenchmarkEngine, random_requests
from benchmarks.peers import card_kind, mix_lengths, peer_figure
from benchmarks.start import first_token_time
from db.repository import RunRepository
from db.session import Database
from kernels.reference.paged_attention import paged_attention
from kernels.specs.paged_attention import make_inputs

SIZES = (
    "--decode-batches 1,2 --input-len 16 --output-len 8 --prefill 2x32,1x2048 --mix-requests 4 --mix-max-len 24 "
    "--invariant-batches 2"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("benchmark") / "result.json"
    engine.main(
        ["--model", "dummy:tiny", "--repeats", "2", *SIZES.split(), "--set", "model.device=cpu", "-o", str(path)]
    )
    return json.loads(path.read_text())


def test_a_run_measures_every_kind_that_a_cpu_can(result: dict[str, Any]) -> None:
    figures = {figure["name"]: figure for figure in result["figures"]}
    assert list(figures) == [
        "decode 1",
        "decode 2",
        "prefill 2x32",
        "prefill 1x2048",
        "mix 4",
        "decode 2, batch invariant",
    ]
    for name in ("decode 1", "decode 2", "prefill 2x32", "mix 4"):
        figure = figures[name]
        assert 0 < figure["min"] <= figure["median"] <= figure["max"]
        assert len(figure["samples"]) == (1 if name == "mix 4" else 2)
        assert len(figure["not_recorded"]["samples"]) == 1
        assert figure["peer"] is None, "a peer's figure of another machine"
    assert figures["decode 2"]["details"]["step_us"] == pytest.approx(2e6 / figures["decode 2"]["median"])
    assert result["models"]["dummy:tiny"]["resolved_config"]["model"]["device"] == "cpu"
    invariant = figures["decode 2, batch invariant"]
    assert (invariant["peer"], invariant["peer_name"]) == (figures["decode 2"]["median"], "the default")
    assert invariant["ratio"] == invariant["median"] / figures["decode 2"]["median"]
    assert invariant["peer_share"] == pytest.approx(figures["decode 2"]["share"])


def test_a_figure_that_fails_says_why_and_the_rest_goes_on(result: dict[str, Any]) -> None:
    failed = next(figure for figure in result["figures"] if figure["name"] == "prefill 1x2048")
    assert failed["median"] is None
    assert "2,048 tokens" in failed["error"]
    assert "2,048 tokens" in table.text_table(result)


def test_only_recorded_passes_reach_the_database_and_all_of_their_steps_do(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'benchmark.db'}")
    benchmark = BenchmarkEngine(
        EngineConfig().with_overrides({"model.name": "dummy:tiny", "model.device": "cpu"}), database
    )
    requests = random_requests([(16, 5)] * 2, 512)
    benchmark.finish(requests, recorded=True)
    benchmark.finish(requests, recorded=False)
    benchmark.close()
    repository = RunRepository(database)
    assert sum(step["num_output_tokens"] for step in repository.steps(1)) == 2 * 5
    assert repository.steps(2) == []
    database.close()


def test_a_pass_without_an_end_is_cut_off(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'benchmark.db'}")
    benchmark = BenchmarkEngine(
        EngineConfig().with_overrides({"model.name": "dummy:tiny", "model.device": "cpu"}), database
    )
    in_flight: dict[str, Flight] = {}

    class OnceAllHaveTokens(threading.Event):
        """The host's thread adds tokens until the driver, which asks, has aborted the requests."""

        def is_set(self) -> bool:
            flights = list(in_flight.values())
            if len(flights) == len(requests) and all(flight.token_ids for flight in flights):
                self.set()
            return super().is_set()

    requests = random_requests([(16, IDLE_OUTPUT_LEN)] * 2, 512)
    ended = benchmark.run(requests, recorded=True, cancel=OnceAllHaveTokens(), in_flight=in_flight)
    benchmark.close()
    database.close()
    assert ended.status == "cancelled"
    assert all(0 < request.num_output_tokens < 1024 for request in ended.requests)
    assert not in_flight


def test_rates() -> None:
    def request(times: tuple[float, ...], num_prompt_tokens: int = 300) -> Any:
        return SimpleNamespace(
            arrival_time=10.0, emission_times=times, num_output_tokens=len(times), num_prompt_tokens=num_prompt_tokens
        )

    assert decode_rate([request((10.5, 11.0, 12.0)), request((11.0, 12.5, 13.0))]) == 2 * 2 / (13.0 - 11.0)
    assert prefill_rate([request((10.5,)), request((11.0,), 700)]) == 1000 / 1.0
    assert mix_rate([request((10.5, 11.0)), request((11.0, 12.0, 14.0))]) == 5 / 4.0


def test_the_mix_is_the_peers() -> None:
    prompts, outputs = zip(*mix_lengths(256), strict=True)
    assert (sum(prompts), sum(outputs)) == (140_857, 141_116)
    assert {*prompts, *outputs} <= set(range(100, 1025))


def test_a_peers_figure_is_of_the_same_card() -> None:
    assert card_kind("NVIDIA H100 80GB HBM3") == "H100"
    assert card_kind("NVIDIA GH200 480GB") is None
    assert peer_figure("NVIDIA H200", "dummy:smollm2-135m", "decode 8") == 4891
    assert peer_figure("NVIDIA A100", "dummy:smollm2-135m", "decode 8") is None


def test_a_ratio_above_one_is_better_for_rates_and_for_times() -> None:
    assert Figure.of("m", "rate", "tok/s", [90.0, 120.0, 300.0], peer=100.0).ratio == 1.2
    assert Figure.of("m", "time", "s", [20.0], peer=60.0).ratio == 3.0


def test_the_peers_share_is_what_its_own_figure_amounts_to() -> None:
    """Both move the same bytes: 3 TB at 4 TB/s take 0.75 s, which is half of 1.5 s and a quarter of 3 s."""
    bytes_moved, copy_bytes_per_s = 3e12, 4e12
    for unit, ours, theirs in (("s", 1.5, 3.0), ("tok/s", 1 / 1.5, 1 / 3.0)):
        figure = Figure.of("m", "f", unit, [ours], peer=theirs, share=bytes_moved / 1.5 / copy_bytes_per_s)  # type: ignore[arg-type]
        assert figure.share == 0.5
        assert figure.peer_share == pytest.approx(0.25)
    assert Figure.of("m", "f", "s", [1.0], share=0.5).peer_share is None


def test_such_a_figure_fails_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that reads a byte a second."""
    monkeypatch.setattr(engine, "measure_limits", lambda device: CardLimits(1.0, 1.0, 1.0))
    path = tmp_path / "result.json"
    sizes = "--only decode --decode-batches 1 --input-len 4 --output-len 3 --repeats 1 --set model.device=cpu"
    with pytest.raises(SystemExit, match=r"error: dummy:tiny, decode 1: .* GB/s cannot be"):
        engine.main(["--model", "dummy:tiny", *sizes.split(), "-o", str(path)])
    assert "cannot be" in capsys.readouterr().out
    (figure,) = json.loads(path.read_text())["figures"]
    assert figure["median"] is None


def test_an_attempt_keeps_the_reason() -> None:
    def fails() -> Figure:
        raise MemoryError("no room")

    assert attempt("m", "decode 1", "tok/s", fails).error == "MemoryError: no room"


def test_idle_share_is_what_no_interval_covers() -> None:
    spans = [(30, 50), (0, 10), (5, 20), (45, 47), (60, 100)]  # nothing runs in 20..30 and 50..60
    assert idle.idle_share(np.array(spans, dtype=np.int64)) == 20 / 100
    with pytest.raises(ValueError, match="nothing ran"):
        idle.idle_share(np.empty((0, 2), dtype=np.int64))


@pytest.mark.gpu
def test_events_tell_how_long_the_device_waits_for_the_next_graph() -> None:
    values = torch.zeros(2**24, device="cuda")
    graph = torch.cuda.CUDAGraph()
    values.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        values.add_(1)
    with idle.replay_events() as events:
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            time.sleep(0.01)
    graph.replay()
    torch.cuda.synchronize()
    assert len(events) == 3, "none after the window"
    (_, first_end), (second_begin, second_end) = events[:2]
    assert first_end.elapsed_time(second_begin) > 9
    assert events[1][0].elapsed_time(second_end) < 9


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 40), (33, 33)])
def test_torchs_attention_reads_the_pool_as_if_in_order(query_len: int, seq_len: int) -> None:
    sizes: dict[str, Any] = {"query_lens": [query_len], "seq_lens": [seq_len], "num_heads": 4, "num_kv_heads": 2}
    inputs = make_inputs(torch.float32, torch.device("cpu"), **sizes)
    blocks = inputs["block_table"].shape[1]
    inputs["block_table"] = torch.arange(1, blocks + 1, dtype=torch.int32)[None]
    expected = paged_attention(**inputs)
    torch.testing.assert_close(
        torch_attention(**torch_inputs(inputs))[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-5
    )


def test_the_first_token_is_timed_by_the_clock_of_all_processes() -> None:
    config = EngineConfig().with_overrides({"model.name": "dummy:tiny", "model.device": "cpu"})
    before = time.perf_counter()
    assert before < first_token_time(config, prompt_len=8) < time.perf_counter()


def test_a_stored_result_becomes_a_table() -> None:
    figures = [
        Figure.of(
            "dummy:x",
            "decode 8",
            "tok/s",
            [1200.0, 1500.0, 1600.0],
            not_recorded=[1550.0],
            peer=1000.0,
            peer_name="vLLM",
            share=0.9,
            limit="copy",
            details={"step_us": 5333.3},
        ),
        Figure.of("dummy:x", "idle 8", "share", [0.034]),
        Figure("dummy:x", "mix 256", "tok/s", error="EngineError: out of memory"),
    ]
    stored = {
        "card": "Card",
        "driver": "570.1",
        "date": "2026-12-01",
        "commit": "0123456789",
        "limits": {"copy_bytes_per_s": 2.9e12, "matmul_flops_per_s": 7.01e14},
        "environment": {"versions": {"torch": "2.11", "triton": "3.6"}},
        "figures": [asdict(figure) for figure in figures],
    }
    assert table.markdown([stored]).splitlines() == [
        "**Card, driver 570.1, torch 2.11, triton 3.6, 2026-12-01, commit 0123456, copies 2.90 TB/s, multiplies 701 TFLOP/s**",
        "",
        "| dummy:x: figure | median | min..max | of the peer | of the limit | the peer's | not recorded | step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| decode 8 | 1,500 tok/s | 1,200..1,600 | 1.50 × vLLM | 90% copy | 60% | 1,550 tok/s | 5,333 us |",
        "| idle 8 | 3.4% | – | – | – | – | – | – |",
        "| mix 256 | – | – | – | – | – | – | – |",
    ]
    shown = table.markdown([stored])
    for figure in stored["figures"]:
        del figure["peer_share"]  # as in results of before it was stored
    assert table.markdown([stored]) == shown


def test_the_readme_shows_the_stored_results() -> None:
    text = table.README.read_text(encoding="utf-8")
    assert table.replace_between_markers(text, table.performance()) == text, "run python -m benchmarks.table"


def test_the_table_needs_its_place() -> None:
    with pytest.raises(ValueError, match="needs one"):
        table.replace_between_markers(f"{table.END} {table.BEGIN}", "table")
    assert (
        table.replace_between_markers(f"a{table.BEGIN}old{table.END}z", "new") == f"a{table.BEGIN}\nnew\n{table.END}z"
    )


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine.main(["--only", "prefil"])
    assert "unknown: prefil" in capsys.readouterr().err
