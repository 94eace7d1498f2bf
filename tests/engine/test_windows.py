"""Models whose layers have a window, against the dense model of transformers, token for token.

Once it has filled its window, a request holds the same number of blocks however long it becomes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from backend.analysis.kv_size import kv_size
from backend.engine.engine_host import EngineHost
from backend.errors import CapacityError
from backend.metrics.block_map import BlockMap
from backend.metrics.ledger_format import read_chunk
from backend.sampling_params import SamplingParams
from tests.engine.driving import Answer, answers, check_idle, config_of, tokens
from tests.engine.test_engine_host import StepSink
from tests.engine.test_equivalence import prompts_of
from tests.engine.test_samples import submit_samples
from tests.helpers import dense_greedy, load_oracle, make_tiny_model

WINDOW = 24
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("Mistral", {"sliding_window": WINDOW}),
    "last layers": ("Qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
}
MAX_TOKENS = 12
PROMPTS = prompts_of([1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5])


class Model:
    """A checkpoint and transformers' continuations of `PROMPTS`."""

    def __init__(self, folder: Path, kind: str) -> None:
        architecture, changes = KINDS[kind]
        self.kind = kind
        self.folder = make_tiny_model(folder, architecture, **changes)
        self.oracle = load_oracle(self.folder)
        self.expected = {key: dense_greedy(self.oracle, prompt, MAX_TOKENS) for key, prompt in PROMPTS.items()}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("models") / "model", request.param)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window of 8 in all layers."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "mistral", "Mistral", sliding_window=8)


def manager_of(host: EngineHost) -> Any:
    return host._require().engine.scheduler.kv_cache_manager


@pytest.mark.parametrize(("block_size", "budget"), [(4, 1), (1, 7), (16, 7), (4, 512)])
def test_tokens_are_those_of_the_dense_model(host: EngineHost, model: Model, block_size: int, budget: int) -> None:
    """Prompts around the window and of several; the second time much of each is in the prefix cache."""
    host.load(config_of(model.folder, cache__block_size=block_size, scheduler__max_num_batched_tokens=budget))
    for turn in range(2 if budget > 1 else 1):
        collected = answers(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert {key: answer.token_ids for key, answer in collected.items()} == model.expected
        for key, answer in collected.items():
            whole = (len(PROMPTS[key]) - 1) // block_size * block_size
            assert answer.last.num_cached_tokens == (whole if turn else 0)


@pytest.mark.parametrize("model", ["last layers"], indirect=True)
@pytest.mark.parametrize(
    "overrides",
    [
        {"scheduler__batching": "static", "scheduler__max_num_seqs": 3, "scheduler__async_scheduling": True},
        {"cache__layout": "contiguous"},
        {"cache__layout": "none"},
        {"cache__num_blocks": "few"},
        {"cache__num_blocks": "few", "scheduler__preemption": "swap", "cache__enable_prefix_caching": False},
    ],
    ids=str,
)
def test_however_it_is_run(host: EngineHost, model: Model, overrides: dict[str, Any]) -> None:
    if few := overrides.get("cache__num_blocks") == "few":
        settings = {"cache__num_blocks": 50, "cache__block_size": 4, "scheduler__max_num_batched_tokens": 16}
        overrides = overrides | settings
    host.load(config_of(model.folder, **overrides))
    collected = answers(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == model.expected
    assert not few or sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0


@pytest.mark.parametrize("model", ["last layers"], indirect=True)
def test_quantized_kv_gives_the_same_tokens_in_any_chunks(host: EngineHost, model: Model) -> None:
    common = {"cache__dtype": "int4", "cache__block_size": 4}
    host.load(config_of(model.folder, **common))
    alone: dict[str, list[int]] = {}
    for key, prompt in PROMPTS.items():
        alone |= tokens(host, {key: prompt}, max_tokens=MAX_TOKENS, ignore_eos=True)
    few = {"cache__num_blocks": 50, "scheduler__preemption": "swap"}
    host.load(config_of(model.folder, scheduler__max_num_batched_tokens=16, **common, **few))
    assert tokens(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True) == alone


@pytest.mark.parametrize("model", ["last layers"], indirect=True)
def test_samples_are_those_of_a_request_by_itself(host: EngineHost, model: Model) -> None:
    """Four of a prompt, in slots for two: some come when the others have left what they would begin with behind."""
    common = {"cache__block_size": 4, "cache__enable_prefix_caching": False}
    sampling = {"temperature": 1.2, "max_tokens": 12, "ignore_eos": True, "seed": 7}
    runs = []
    for num_seqs in (16, 2):
        host.load(config_of(model.folder, scheduler__max_num_seqs=num_seqs, **common))
        collected: dict[str, Answer] = {}
        for key, prompt in PROMPTS.items():
            collected |= submit_samples(host, key, prompt, 4, **sampling)
        assert {answer.finish_reason for answer in collected.values()} == {"length"}
        check_idle(host)
        runs.append({key: answer.token_ids for key, answer in collected.items()})
    assert runs[0] == runs[1]
    assert len({tuple(runs[0][f"p24/{index}"]) for index in range(4)}) == 4
    for index in range(2):
        params = SamplingParams(**sampling).sample(index)  # type: ignore[arg-type]
        alone = tokens(host, {"a": PROMPTS["p77"]}, **(sampling | {"seed": params.seed}))
        assert alone["a"] == runs[0][f"p77/{index}"]


def test_random_traffic_in_a_small_pool(host: EngineHost, model: Model) -> None:
    """Prompts with common beginnings, preempted and cut into chunks, each checked by one dense pass."""
    rng = random.Random(3)
    stem = [rng.randrange(256) for _ in range(60)]
    prompts = {
        str(index): stem[: rng.choice([0, 20, 60])] + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        for index in range(12)
    }
    few = {"cache__num_blocks": 16 if model.kind == "all layers" else 60, "cache__block_size": 4}
    host.load(config_of(model.folder, scheduler__max_num_batched_tokens=11, **few))
    collected = answers(host, prompts, max_tokens=12, ignore_eos=True)
    expected = {key: dense_greedy(model.oracle, prompt, 12) for key, prompt in prompts.items()}
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0


def test_ten_windows_take_the_blocks_of_one(host: EngineHost, mistral: Path) -> None:
    """A window of 8 in blocks of 4: two blocks and a bit, three. The ledger tells the same, and `kv_size` its bytes."""
    host.load(config_of(mistral, cache__block_size=4, cache__num_blocks=6, scheduler__max_num_batched_tokens=8))
    info = host._require().info
    assert info.resolved_config.model.max_model_len == 1024, "any length fits"
    assert info.notices == ()
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    (answer,) = answers(host, {"a": [1, 2, 3]}, max_tokens=80, ignore_eos=True).values()
    host.set_sink(None)
    assert answer.token_ids == dense_greedy(mistral, [1, 2, 3], 80)
    held = [step.num_referenced_blocks for step in sink.steps]
    assert max(held) == 3
    assert set(held[12:-1]) <= {2, 3}

    segments = [read_chunk(chunk[1]) for chunk in sink.chunks]
    key_frame = segments[0].key_frame
    assert key_frame is not None
    blocks, told = BlockMap(key_frame), []
    for index, step in enumerate(step for segment in segments for step in segment.steps):
        if index:  # the key frame is behind the first step's events
            blocks.apply(step.events)
        told.append(len(blocks.ref_counts()))
    assert told == held

    kv = kv_size(json.loads((mistral / "config.json").read_text()), "float32").blocks(4)
    assert kv.request_blocks(83) == (max(held),)
    assert info.load["kv_cache_bytes"] == 7 * kv.bytes_per_block
    assert info.load["kv_bytes_per_token"] == kv.kv.bytes_per_token


@pytest.mark.parametrize("model", ["last layers"], indirect=True)
def test_a_mixed_model_holds_what_kv_size_says(host: EngineHost, model: Model) -> None:
    """Token by token, so that no chunk is in flight: the most bytes of a request on its way to 90 tokens."""
    host.load(config_of(model.folder, cache__block_size=4, scheduler__max_num_batched_tokens=1))
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    answers(host, {"a": PROMPTS["p77"]}, max_tokens=13, ignore_eos=True)
    host.set_sink(None)
    info = host._require().info
    kv = kv_size(json.loads((model.folder / "config.json").read_text()), "float32").blocks(4)
    assert max(step.num_referenced_blocks for step in sink.steps) * kv.bytes_per_block == kv.request_bytes(89)
    assert info.load["kv_cache_bytes"] == (info.load["num_blocks"] + 1) * kv.bytes_per_block


def test_the_longest_request_is_what_the_pool_holds(host: EngineHost, model: Model) -> None:
    common = {"cache__block_size": 4, "scheduler__max_num_batched_tokens": 8}
    host.load(config_of(model.folder, cache__num_blocks=40, **common))
    info = host._require().info
    if model.kind == "all layers":
        assert info.resolved_config.model.max_model_len == 1024
        return
    # One full layer and two with a window are three groups of one layer; a window takes ceil((24 - 1 + 8) / 4) + 1 = 9.
    assert manager_of(host).blocks_needed(1000) == 250 + 2 * 9
    assert info.resolved_config.model.max_model_len == (40 - 2 * 9) * 4
    assert "model.max_model_len is 88 tokens instead of 1,024" in info.notices[0]
    with pytest.raises(CapacityError, match="holds no prompt and output together in each of its 3 KV groups"):
        host.load(config_of(model.folder, cache__num_blocks=2, **common))


def test_a_dummy_with_windows_can_be_tried(host: EngineHost) -> None:
    host.load(config_of("dummy:tiny-windows", cache__block_size=4))
    whole = tokens(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True)
    host.load(config_of("dummy:tiny-windows", cache__num_blocks=60, scheduler__max_num_batched_tokens=5))
    assert tokens(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True) == whole


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"kernels__enforce_eager": True},
        {"cache__block_size": 1, "scheduler__max_num_batched_tokens": 33},
        {"cache__num_blocks": 120, "cache__block_size": 4, "scheduler__max_num_batched_tokens": 16},
        {"kernels__batch_invariant": True},
        {"kernels__backend": "reference"},
    ],
    ids=str,
)
def test_on_a_gpu(host: EngineHost, model: Model, overrides: dict[str, Any]) -> None:
    """In graphs and without them; 130 tokens take a decode graph's tables over many blocks and out of the window."""
    on_gpu = {"model__device": "cuda", "model__dtype": "float32", "cache__num_blocks": 1024}
    host.load(config_of(model.folder, **(on_gpu | overrides)))
    expected = {key: dense_greedy(model.oracle, prompt, 130) for key, prompt in PROMPTS.items()}
    assert tokens(host, PROMPTS, max_tokens=130, ignore_eos=True) == expected
