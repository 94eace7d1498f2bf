from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import EngineConfig
from backend.core.output import PendingOutput, SchedulerOutput
from backend.engine.engine_host import EngineHost
from backend.engine.in_process_target import InProcessTarget
from backend.errors import CapacityError, ConfigError, EngineError, ModelError, RequestError
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_format import read_chunk
from backend.metrics.stats import MemoryUse, StepStats
from backend.sampling_params import SamplingParams
from backend.workload.targets import Prompt, StreamEvent
from tests.engine.driving import (
    Answer,
    Pausing,
    answers,
    ask,
    between_steps,
    check_idle,
    config_of,
    held,
    submit,
    submit_to,
    tokens,
)
from tests.helpers import dense_greedy, load_oracle
from tests.waiting import PATIENCE_S, until


class StepSink:
    """Keeps steps and chunks; the rest of a run's records does not come from the engine."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.chunks: list[tuple[str, bytes, int, int]] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self.chunks.append((kind, encode(), first_step, last_step))


def test_every_way_a_request_can_end(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    prompt = [10, 20, 30]
    whole = dense_greedy(tiny_llama, prompt, 30)
    by_length = answers(host, {"a": prompt}, max_tokens=30, ignore_eos=True)["a"]
    assert (by_length.token_ids, by_length.finish_reason) == (whole, "length")
    by_id = answers(host, {"a": prompt}, max_tokens=30, stop_token_ids=(whole[9],), ignore_eos=True)["a"]
    assert by_id.token_ids == whole[: whole.index(whole[9])]
    assert by_id.finish_reason == "stop"
    aborted = submit_to(Pausing(), host, "long", prompt, max_tokens=900, ignore_eos=True)
    with aborted.paused():
        host.abort("long")
    assert aborted.finish_reason == "abort"
    host.abort("long")
    host.abort("nobody")
    check_idle(host)


def test_min_tokens_keeps_the_ending_ids_from_being_chosen(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    prompt = [10, 20, 30]
    whole = dense_greedy(tiny_llama, prompt, 12)
    ending = whole[3]
    answer = answers(host, {"a": prompt}, max_tokens=12, min_tokens=8, stop_token_ids=(ending,), ignore_eos=True)["a"]
    assert answer.token_ids[:3] == whole[:3]
    assert ending not in answer.token_ids
    assert len(answer.token_ids) >= 8


def test_a_stop_string_ends_the_text_before_it(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    prompt = [72, 101, 108]
    text = answers(host, {"a": prompt}, max_tokens=40, ignore_eos=True)["a"].text
    assert len(text) > 20
    stop = text[11:14]
    answer = answers(host, {"a": prompt}, max_tokens=40, ignore_eos=True, stop=(stop,))["a"]
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"
    streamed = ""
    for event in answer.events:
        streamed += event.text
        assert text.startswith(streamed)
        assert stop not in streamed
    near_miss = answers(host, {"a": prompt}, max_tokens=40, ignore_eos=True, stop=(text[-3:] + "never",))["a"]
    assert near_miss.text == text, "held-back text is delivered at the end"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 64, "64 tokens, but prompt and output together may have 64"),
        ([1, 512], "token id 512 is not in the vocabulary: ids go from 0 to 511"),
        ([-1], "token id -1"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_once(
    host: EngineHost, tiny_llama: Path, prompt: list[int], message: str
) -> None:
    host.load(config_of(tiny_llama, cache__num_blocks=4))
    neighbour = submit(host, "neighbour", [1, 2], max_tokens=20, ignore_eos=True)
    with pytest.raises(RequestError, match=message):
        host.submit("bad", prompt, SamplingParams(), Answer().take)
    assert len(neighbour.last.request_id and neighbour.token_ids) == 20
    check_idle(host)


def test_a_prompt_longer_than_the_pool_names_both_numbers(host: EngineHost, tiny_llama: Path) -> None:
    """It would block the queue for ever (vllm-project/vllm#39734).

    The pool, not the model's context of 1,024, is the limit here, and the run is told.
    """
    info = host.load(config_of(tiny_llama, cache__num_blocks=4))
    assert info.resolved_config.model.max_model_len == 64
    assert any("64 tokens instead of 1,024" in notice for notice in info.notices)
    with pytest.raises(RequestError, match=r"110 tokens.* 64 "):
        host.submit("bad", [1] * 110, SamplingParams(), Answer().take)
    fits = submit(host, "fits", [1] * 50, max_tokens=100, ignore_eos=True)
    others = [submit(host, f"short{index}", [index], max_tokens=5, ignore_eos=True) for index in range(3)]
    assert (fits.finish_reason, len(fits.token_ids)) == ("length", 14)
    assert [len(other.last and other.token_ids) for other in others] == [5, 5, 5]


def test_an_id_in_use_is_refused_without_harm_to_its_owner(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    with held(host):
        first = submit(host, "same", [1], max_tokens=50, ignore_eos=True)
        second = submit(host, "same", [2], max_tokens=50, ignore_eos=True)
    assert second.finish_reason == "error"
    assert "already in use" in (second.last.error or "")
    assert (first.finish_reason, len(first.token_ids)) == ("length", 50)


def test_a_bad_config_leaves_the_host_usable(host: EngineHost, tiny_llama: Path, tmp_path: Path) -> None:
    host.load(config_of(tiny_llama))
    with pytest.raises(ModelError):
        host.load(config_of(tmp_path / "nothing"))
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3, "a wrong name unloads nothing"
    with pytest.raises(ConfigError, match=r"2,048 is above the context of .*1,024"):
        host.load(config_of(tiny_llama, model__max_model_len=2048))
    assert (host.state, host.info) == ("empty", None)
    with pytest.raises(EngineError, match="no model is loaded"):
        host.submit("a", [1], SamplingParams(), Answer().take)
    with pytest.raises(CapacityError, match=r"num_blocks = 1 of 1 token .* two tokens are the least"):
        host.load(config_of(tiny_llama, cache__num_blocks=1, cache__block_size=1))
    with pytest.raises(CapacityError, match=r"the KV cache of 999,999,999 blocks needs .* MiB"):
        host.load(config_of(tiny_llama, cache__num_blocks=999_999_999))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            host.load(EngineConfig().with_overrides({"model.name": str(tiny_llama), "model.device": "cuda"}))
    host.load(config_of(tiny_llama))
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3


def test_loading_the_same_config_again_keeps_the_engine(host: EngineHost, tiny_llama: Path) -> None:
    first = host.load(config_of(tiny_llama))
    assert host.load(config_of(tiny_llama)) is first
    assert host.load(config_of(tiny_llama, cache__block_size=8)) is not first


def test_a_model_whose_files_changed_is_loaded_anew(host: EngineHost, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    first = host.load(config_of(folder))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: -tensor for name, tensor in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    assert host.load(config_of(folder)) is not first
    assert tokens(host, {"a": [1, 2]}, max_tokens=8, ignore_eos=True)["a"] == dense_greedy(
        load_oracle(folder), [1, 2], 8
    )


def test_a_request_is_checked_against_the_engine_it_reaches(host: EngineHost, tiny_llama: Path) -> None:
    """A smaller engine is loaded between the check on the caller's thread and the request's turn."""
    host.load(config_of(tiny_llama))
    with held(host):
        loading = ask(host, lambda: host.load(config_of(tiny_llama, cache__num_blocks=4)))
        answer = submit(host, "long", [1] * 500)
    loading.result(PATIENCE_S)
    assert "500 tokens" in (answer.last.error or "")
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3


def test_listeners_that_fail_harm_nobody_else(host: EngineHost, tiny_llama: Path) -> None:
    def fail(event: StreamEvent) -> None:
        raise RuntimeError("a listener's own fault")

    host.load(config_of(tiny_llama))
    with held(host):
        host.submit("a", [1], SamplingParams(max_tokens=50, ignore_eos=True), fail)
        host.submit("a", [1], SamplingParams(), fail)  # refused on the engine's thread: the id is in use
    assert len(tokens(host, {"b": [1]}, max_tokens=60, ignore_eos=True)["b"]) == 60


def test_nothing_waits_for_a_closed_host(tiny_llama: Path) -> None:
    host = EngineHost()
    errors = []

    def load_often() -> None:
        try:
            while True:
                host.load(config_of(tiny_llama))
        except EngineError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=load_often, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: host.state == "ready")
    host.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert set(errors) == {"the engine is closed"}
    assert host.info is None


def test_loading_another_model_ends_what_is_in_flight(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    answer = submit_to(Pausing(), host, "a", [1], max_tokens=900, ignore_eos=True)
    between_steps(host, answer, lambda: host.load(config_of(tiny_llama, cache__block_size=32)))
    assert (answer.finish_reason, answer.last.error) == ("error", "another model was loaded")
    check_idle(host)


def test_a_function_runs_between_steps_on_the_thread_of_the_steps(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    stepping: Future[threading.Thread] = Future()
    host.submit("a", [1], SamplingParams(max_tokens=1), lambda event: stepping.set_result(threading.current_thread()))
    owner = stepping.result(PATIENCE_S)
    assert owner is not threading.current_thread()
    assert host.execute(threading.current_thread) is owner

    def fail() -> None:
        raise ConfigError("no such op")

    with pytest.raises(ConfigError, match="no such op"):
        host.execute(fail)
    gate, ran = threading.Event(), threading.Event()
    holder = threading.Thread(target=host.execute, args=(lambda: ran.set() or gate.wait(PATIENCE_S),))
    holder.start()
    assert ran.wait(PATIENCE_S)
    waiting = submit(host, "b", [1], max_tokens=3, ignore_eos=True)
    assert not waiting.done.wait(0.1), "a step beside the function"
    gate.set()
    holder.join()
    assert waiting.finish_reason == "length"


def test_no_function_runs_beside_requests(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    ran: list[int] = []
    answer = submit_to(Pausing(), host, "a", [1], max_tokens=900, ignore_eos=True)
    with answer.paused():
        refused = [ask(host, lambda: host.execute(lambda: ran.append(1))), ask(host, host.unload)]
        host.abort("a")
    for asked in refused:
        with pytest.raises(EngineError, match="requests under way: 1"):
            asked.result(PATIENCE_S)
    assert answer.finish_reason == "abort"
    assert (ran, host.state) == ([], "ready")
    host.execute(lambda: ran.append(1))  # the steps that the abort left behind are over by then
    assert ran == [1]
    check_idle(host)


def test_unloading_frees_the_engine_and_the_same_config_loads_again(host: EngineHost, tiny_llama: Path) -> None:
    first = host.load(config_of(tiny_llama))
    engine = weakref.ref(host._require().engine)
    host.unload()
    assert (host.state, host.info, engine()) == ("empty", None, None)
    assert host.memory() == MemoryUse(0, 0, None, None)
    host.unload()
    assert host.load(config_of(tiny_llama)) is not first
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3


def test_nothing_runs_on_a_closed_host() -> None:
    host = EngineHost()
    started, gate, outcome = threading.Event(), threading.Event(), list[str]()
    threading.Thread(target=host.execute, args=(lambda: started.set() or gate.wait(PATIENCE_S),)).start()
    assert started.wait(PATIENCE_S)

    def late() -> None:
        try:
            host.execute(lambda: outcome.append("ran"))
        except EngineError as error:
            outcome.append(str(error))

    waiting = threading.Thread(target=late)
    waiting.start()
    until(lambda: not host._commands.empty())
    closing = threading.Thread(target=host.close)
    closing.start()
    until(lambda: host._closing)
    gate.set()
    closing.join()
    waiting.join()
    with pytest.raises(EngineError, match="the engine is closed"):
        host.execute(lambda: outcome.append("ran"))
    with pytest.raises(EngineError, match="the engine is closed"):
        host.unload()
    assert outcome == ["the engine is closed"]


class FailingExecutor:
    """A device that has failed, and fails again when it is to be let go of."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        raise RuntimeError("device-side assert")

    def shutdown(self) -> None:
        raise RuntimeError("device-side assert")

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_a_step_that_fails_ends_every_request_with_the_cause(tiny_llama: Path) -> None:
    host = EngineHost()
    host.load(config_of(tiny_llama))
    engine = host._require().engine
    engine.executor = FailingExecutor(engine.executor)  # type: ignore[assignment]
    ended = [submit(host, str(index), [index], max_tokens=4) for index in range(3)]
    for answer in ended:
        assert answer.finish_reason == "error"
    assert "device-side assert" in (ended[0].last.error or "")
    until(lambda: host.state != "ready")
    host._call(lambda: None)
    assert host.state == "failed"
    host.load(config_of(tiny_llama))
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3
    host.close()
    host.close()
    assert host.state == "closed"
    with pytest.raises(EngineError, match="closed"):
        host.load(config_of(tiny_llama))


def test_damaged_weights_end_one_request_and_its_blocks_come_back_clean(tiny_llama: Path, tmp_path: Path) -> None:
    """The largest of NaN logits is id 0, which prints '!' (QwenLM/Qwen3#761).

    A NaN in one embedding row; the pool is so small that its blocks are used again at once.
    """
    prompts = {key: [index, 7] for index, key in enumerate("abc")}
    expected = {key: dense_greedy(tiny_llama, prompt, 8) for key, prompt in prompts.items()}
    damaged = next(token_id for token_id in range(10, 512) if all(token_id not in ids for ids in expected.values()))
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][damaged] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    host = EngineHost()
    host.load(config_of(folder, cache__num_blocks=6, scheduler__max_num_batched_tokens=24))
    for _ in range(3):
        bad = submit(host, "bad", [5] * 30 + [damaged] + [6] * 20, max_tokens=8)
        others = {key: submit(host, key, prompt, max_tokens=8, ignore_eos=True) for key, prompt in prompts.items()}
        assert bad.finish_reason == "error"
        assert "not finite" in (bad.last.error or "")
        assert {key: answer.last and answer.token_ids for key, answer in others.items()} == expected
    host.close()


def test_the_ledger_and_the_step_records_add_up(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama, scheduler__max_num_batched_tokens=16))
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    prompts = {"a": [1] * 40, "b": [2] * 5}
    collected = answers(host, prompts, max_tokens=6, ignore_eos=True)
    host.set_sink(None)
    count = len(sink.steps)
    answers(host, {"later": [1]}, max_tokens=2)
    assert len(sink.steps) == count, "nothing reaches a sink that was taken away"

    assert [step.step for step in sink.steps] == list(range(count))
    assert sum(step.num_output_tokens for step in sink.steps) == 12
    assert sum(step.num_prefill_tokens for step in sink.steps) == 45
    assert sum(step.num_decode_tokens for step in sink.steps) == 10
    ledger = [step for kind, data, *_ in sink.chunks if kind == LEDGER_KIND for step in read_chunk(data).steps]
    assert [step.step for step in ledger] == list(range(count))
    per_request: dict[str, int] = {}
    for step, stats in zip(ledger, sink.steps, strict=True):
        assert len(step.entries) == stats.num_scheduled_requests
        for entry in step.entries:
            per_request[entry.request_id] = per_request.get(entry.request_id, 0) + entry.num_scheduled_tokens
    assert per_request == {"a": 45, "b": 10}, "the last token of a request is never computed"
    for stats in sink.steps:
        assert stats.duration_ms == pytest.approx(stats.schedule_ms + stats.execute_ms + stats.process_ms, abs=1e-6)
        assert 0 < stats.kv_cache_usage <= 1
    last = collected["a"].last
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_preemptions) == (40, 0, 0)
    assert last.scheduled_time is not None


def test_requests_from_many_threads_all_end_once(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama, cache__num_blocks=40))
    collected: dict[str, Answer] = {}
    expected = {value: dense_greedy(tiny_llama, [value], 5) for value in range(4)}

    def client(value: int) -> None:
        for turn in range(10):
            key = f"{value}/{turn}"
            collected[key] = submit(host, key, [value], max_tokens=5, ignore_eos=True)
            if turn % 3 == 2:
                host.abort(key)
            threading.Event().wait(0.001)

    threads = [threading.Thread(target=client, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, answer in collected.items():
        assert answer.finish_reason in ("length", "abort")
        assert answer.token_ids == expected[int(key[0])][: len(answer.token_ids)]
    check_idle(host)


def test_prompts_as_chat_text_and_ids_reach_the_engine(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    target = InProcessTarget(host)
    raw = target.encode(Prompt(text="Hi"))
    assert raw == host.tokenizer.encode("Hi")
    chat = target.encode(Prompt(text="Hi", chat=True))
    assert chat == host.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert len(chat) > len(raw)
    assert target.encode(Prompt(token_ids=(4, 5))) == [4, 5]
    for empty in (Prompt(text=""), Prompt(text="", chat=True), Prompt(token_ids=())):
        with pytest.raises(RequestError, match="the prompt is empty"):
            target.submit("a", empty, SamplingParams(), Answer().take)
    seen: list[StreamEvent] = []
    done = threading.Event()
    target.submit(
        "b", Prompt(text="Hi"), SamplingParams(max_tokens=2), lambda e: (seen.append(e), e.finish_reason and done.set())
    )
    assert done.wait(PATIENCE_S)
    assert seen[-1].num_prompt_tokens == len(raw)


def test_a_dummy_model_takes_ids_and_bytes(host: EngineHost) -> None:
    host.load(config_of("dummy:tiny"))
    answer = submit(host, "a", InProcessTarget(host).encode(Prompt(text="hé")), max_tokens=4)
    assert InProcessTarget(host).encode(Prompt(text="hé")) == list("hé".encode())
    assert len(answer.last and answer.token_ids) == 4
    assert answer.text == ""
