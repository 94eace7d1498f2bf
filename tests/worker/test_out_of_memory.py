"""A device without memory left, at each stage of loading and in a step: what is said, what is held, what runs afterwards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch

from backend.attention.metadata import LayerCache
from backend.engine import engine_host
from backend.engine.engine_host import EngineHost
from backend.errors import CapacityError
from backend.metrics.stats import MemoryUse
from backend.models.decoder import Decoder
from backend.worker.block_transfer import BlockTransfer
from backend.worker.decoders import ReferenceDecoder
from backend.worker.memory_profile import free_after_profile_run
from backend.worker.model_runner import ModelRunner
from backend.worker.out_of_memory import is_out_of_memory
from tests.engine.driving import config_of, submit, tokens
from tests.helpers import dense_greedy, make_tiny_llama
from tests.waiting import until

PROMPT = [10, 20, 30]

OUT_OF_MEMORY: dict[str, Callable[[], RuntimeError]] = {
    "allocator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    "driver": lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
    "accelerator": lambda: torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    "triton": lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
FAILED: dict[str, Callable[[], RuntimeError]] = {
    "memory access": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "shared memory": lambda: RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376"),
}


class Stage(Protocol):
    """Makes the engine fail there with what it is given."""

    def __call__(self, monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None: ...


def raising(make_error: Callable[[], RuntimeError]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise make_error()

    return fail


def at_weights(monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None:
    """With all of them on the device: what is derived from them finds no room."""
    monkeypatch.setattr(Decoder, "prepare", raising(make_error))


def at_profile_run(monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None:
    """In the logits of the largest step, on a CPU that stands for a card of 1 GiB."""

    def determine_num_blocks(runner: ModelRunner) -> int:
        assert runner._decoder is not None
        assert runner._attention is not None
        shape = runner.kv_cache_shape
        free = free_after_profile_run(runner._config, runner._decoder, runner._attention, runner._sampler, shape)
        return shape.blocks_in(free, "the card")

    for name, value in {
        "empty_cache": None,
        "mem_get_info": (2**30, 2**30),
        "memory_allocated": 0,
        "max_memory_allocated": 2**20,
        "reset_peak_memory_stats": None,
        "synchronize": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr(ModelRunner, "determine_num_blocks", determine_num_blocks)
    monkeypatch.setattr(ReferenceDecoder, "compute_logits", raising(make_error))


def at_capture(monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None:
    """Of an engine that has CUDA graphs, which none has on a CPU."""
    capture = ModelRunner.capture_cuda_graphs

    def capture_cuda_graphs(runner: ModelRunner, *args: Any) -> None:
        runner._config = runner._config.with_overrides({"kernels.enforce_eager": False})
        capture(runner, *args)

    monkeypatch.setattr(ModelRunner, "capture_cuda_graphs", capture_cuda_graphs)
    graphs = SimpleNamespace(capture_graphs=raising(make_error))
    monkeypatch.setitem(sys.modules, "backend.worker.graphs", graphs)  # which would need triton


def in_forward(monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None:
    monkeypatch.setattr(ReferenceDecoder, "forward", raising(make_error))


def in_logits(monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None:
    monkeypatch.setattr(ReferenceDecoder, "compute_logits", raising(make_error))


def in_block_transfer(monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], RuntimeError]) -> None:
    monkeypatch.setattr(BlockTransfer, "copy", raising(make_error))


# What each stage's message tells to lower.
WHILE_LOADING: dict[str, tuple[Stage, tuple[str, ...]]] = {
    "weights": (at_weights, ("smaller model", "model.dtype", "quantization.method")),
    "profile run": (
        at_profile_run,
        ("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs", "model.max_model_len"),
    ),
    "capture": (
        at_capture,
        (
            "cache.gpu_memory_utilization",
            "cache.num_blocks",
            "scheduler.max_num_seqs",
            "kernels.enforce_eager = true",
        ),
    ),
}
IN_A_STEP = ("cache.gpu_memory_utilization", "scheduler.max_num_batched_tokens")

STEPS: dict[str, Stage] = {"forward": in_forward, "logits": in_logits, "block transfer": in_block_transfer}
# Two requests of six blocks, of which the pool holds nine: one of them is swapped out.
SWAPPING = {"scheduler__preemption": "swap", "cache__num_blocks": 9, "scheduler__max_num_seqs": 2}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every model and every layer's keys that engines have made; nobody but an engine may keep them."""
    made: list[weakref.ref[Any]] = []
    init, zeros = Decoder.__init__, LayerCache.zeros

    def make_decoder(decoder: Decoder, *args: Any, **options: Any) -> None:
        init(decoder, *args, **options)
        made.append(weakref.ref(decoder))

    def make_cache(*args: Any) -> LayerCache:
        cache = zeros(*args)
        made.append(weakref.ref(cache.key_cache))
        return cache

    monkeypatch.setattr(Decoder, "__init__", make_decoder)
    monkeypatch.setattr(LayerCache, "zeros", make_cache)
    monkeypatch.setattr(engine_host.logger, "disabled", True)  # pytest keeps what is logged, with its traceback
    return made


def held(made: list[weakref.ref[Any]]) -> list[Any]:
    return [ref() for ref in made if ref() is not None]


@pytest.mark.parametrize("kind", ["allocator", "driver"])
@pytest.mark.parametrize("stage", WHILE_LOADING)
def test_a_load_without_memory_names_what_to_lower_and_leaves_nothing_behind(
    stage: str,
    kind: str,
    host: EngineHost,
    made: list[weakref.ref[Any]],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail, settings = WHILE_LOADING[stage]
    config = config_of(tiny_llama)
    shut_down: list[ModelRunner] = []  # which gives the card back what PyTorch keeps of it
    shutdown = ModelRunner.shutdown
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "shutdown", lambda runner: (shut_down.append(runner), shutdown(runner)))
        fail(patch, OUT_OF_MEMORY[kind])
        with pytest.raises(CapacityError) as caught:
            host.load(config)
    message = str(caught.value)
    assert [setting for setting in settings if setting not in message] == []
    assert "\n" not in message
    assert len(shut_down) == 1
    assert made, "it failed before there was anything to let go of"
    assert held(made) == [], "whoever keeps the error must not keep the weights"
    assert (host.state, host.info, host.memory()) == ("empty", None, MemoryUse(0, 0, None, None))
    host.load(config)
    assert tokens(host, {"a": PROMPT}, max_tokens=4, ignore_eos=True) == {"a": dense_greedy(tiny_llama, PROMPT, 4)}


@pytest.mark.parametrize("kind", ["allocator", "driver"])
@pytest.mark.parametrize("stage", STEPS)
def test_a_step_without_memory_ends_its_requests_with_what_to_lower(
    stage: str,
    kind: str,
    host: EngineHost,
    made: list[weakref.ref[Any]],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(tiny_llama, **SWAPPING)
    host.load(config)
    with monkeypatch.context() as patch:
        STEPS[stage](patch, OUT_OF_MEMORY[kind])
        answers = [submit(host, str(index), [index] * 40, max_tokens=50, ignore_eos=True) for index in range(2)]
        assert [answer.finish_reason for answer in answers] == ["error", "error"]
        until(lambda: host.state == "failed")
    for answer in answers:
        message = answer.last.error or ""
        assert message.startswith("the engine failed in a step: the GPU ran out of memory in a step of ")
        assert [setting for setting in IN_A_STEP if setting not in message] == []
        assert "\n" not in message
    # The engine's thread may have yet to leave the step of which it says that it has failed.
    until(lambda: held(made) == [], patience_s=5)
    assert (host.info, host.memory()) == (None, MemoryUse(0, 0, None, None))
    host.load(config)
    assert tokens(host, {"a": PROMPT}, max_tokens=4, ignore_eos=True) == {"a": dense_greedy(tiny_llama, PROMPT, 4)}


@pytest.mark.parametrize("stage", WHILE_LOADING)
def test_another_failure_of_a_load_is_not_taken_for_a_lack_of_memory(
    stage: str, host: EngineHost, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WHILE_LOADING[stage][0](monkeypatch, FAILED["memory access"])
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"):
        host.load(config_of(tiny_llama))


def test_another_failure_of_a_step_is_not_taken_for_a_lack_of_memory(
    host: EngineHost, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.load(config_of(tiny_llama))
    in_forward(monkeypatch, FAILED["memory access"])
    answer = submit(host, "a", PROMPT, max_tokens=4)
    assert "in a step: RuntimeError: CUDA error: an illegal memory access" in (answer.last.error or "")


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_lack_of_memory_is_recognised_however_it_is_said(kind: str) -> None:
    assert is_out_of_memory(OUT_OF_MEMORY[kind]())


@pytest.mark.parametrize("kind", FAILED)
def test_what_is_no_lack_of_memory(kind: str) -> None:
    assert not is_out_of_memory(FAILED[kind]())


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_lack_of_memory_is_recognised_behind_the_capture_that_it_cut_short(kind: str) -> None:
    """`torch.cuda.graph` ends the capture on its way out, which then raises an error of its own."""

    @contextmanager
    def graph() -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="previous error during capture") as caught, graph():
        raise OUT_OF_MEMORY[kind]()
    assert is_out_of_memory(caught.value)
