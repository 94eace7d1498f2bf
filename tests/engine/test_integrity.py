"""The check of KV blocks after each step, in debug and in the engine's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.engine.llm_engine import LLMEngine
from backend.engine.loading import load_engine
from backend.errors import EngineError
from backend.sampling_params import SamplingParams
from tests.engine.driving import config_of, submit
from tests.engine.integrity import MadeEngines
from tests.waiting import until


def started(model: Path, **overrides: Any) -> LLMEngine:
    """With one request under way."""
    engine = load_engine(config_of(model, cache__num_blocks=50, **overrides), lambda phase: None).engine
    engine.add_request("a", [1] * 20, SamplingParams(max_tokens=12, ignore_eos=True), 0.0)
    for _ in range(3):
        engine.step()
    return engine


def miscount(engine: LLMEngine) -> int:
    """Count one holder too many; the block."""
    manager = engine.scheduler.kv_cache_manager
    block_id = manager.state().held["a"][0][0]
    manager.pool._ref_cnt[block_id] += 1
    return block_id


@pytest.mark.parametrize("asynchronous", [False, True])
def test_in_debug_the_next_step_fails(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, made_engines: MadeEngines, asynchronous: bool
) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")
    engine = started(tiny_llama, scheduler__async_scheduling=asynchronous)
    block_id = miscount(engine)
    made_engines.broken.add(engine)
    with pytest.raises(
        EngineError, match=f"inconsistent after a step .*block {block_id} has 2 references but 1 holders"
    ):
        engine.step()
    engine.executor.shutdown()


@pytest.mark.parametrize("value", [None, ""])
def test_otherwise_nobody_looks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, made_engines: MadeEngines, value: str | None
) -> None:
    """Not even when the variable is set later: what an engine does is decided when it is made."""
    monkeypatch.delenv("SERVELAB_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVELAB_DEBUG", value)
    engine = started(tiny_llama)
    monkeypatch.setenv("SERVELAB_DEBUG", "1")
    miscount(engine)
    made_engines.broken.add(engine)
    while engine.has_unfinished_requests():
        engine.step()
    engine.executor.shutdown()


def test_in_debug_a_sound_engine_serves_and_a_broken_one_tells_its_clients(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, made_engines: MadeEngines
) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")
    host = EngineHost()
    host.load(config_of(tiny_llama, cache__num_blocks=50))
    assert submit(host, "sound", [1, 2, 3], max_tokens=4, ignore_eos=True).finish_reason == "length"
    engine = host._require().engine
    made_engines.broken.add(engine)
    host._call(lambda: engine.scheduler.kv_cache_manager.pool._ref_cnt.__setitem__(50, 1))
    answer = submit(host, "broken", [1, 2, 3], max_tokens=4, ignore_eos=True)
    assert answer.finish_reason == "error"
    assert "the KV cache is inconsistent" in (answer.last.error or "")
    until(lambda: host.state != "ready")
    host._call(lambda: None)
    assert host.state == "failed"
    host.close()


def test_what_a_test_leaves_behind_is_looked_at(tiny_llama: Path, made_engines: MadeEngines) -> None:
    """An engine that is stepped here, and one that belongs to a host's thread."""
    mine, host = started(tiny_llama), EngineHost()
    host.load(config_of(tiny_llama, cache__num_blocks=50))
    for engine in (mine, host._require().engine):
        pool = engine.scheduler.kv_cache_manager.pool
        pool._ref_cnt[50] += 1
        with pytest.raises(RuntimeError, match="block 50 has 1 references"):
            made_engines.check()
        pool._ref_cnt[50] -= 1
        made_engines.check()
    host.close()
    mine.executor.shutdown()
