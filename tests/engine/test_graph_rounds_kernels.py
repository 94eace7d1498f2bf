"""What rounds in graphs run, over the Triton kernels, on a CPU through the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.engine.engine_host import EngineHost  # noqa: E402
from backend.models.sources import resolve_source  # noqa: E402
from backend.spec_decode.heads.target import DenseTarget  # noqa: E402
from tests.engine.driving import config_of  # noqa: E402
from tests.engine.heads import KINDS, answers_and_rounds, check_drafts, load_drafter, random_head, save  # noqa: E402
from tests.engine.looking_up import count_rounds  # noqa: E402
from tests.engine.scripted import make_scripted  # noqa: E402
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama  # noqa: E402
from tests.spec_decode.tiny_heads import CPU  # noqa: E402
from tests.worker.recorded_graphs import recorded_graphs  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="through the interpreter; test_graph_rounds_gpu.py has kernels"
)

PROMPTS = {"one": [200], "longer": [*range(30, 39)]}
SMALL: dict[str, Any] = {
    "kernels__backend": "triton",
    "kernels__enforce_eager": True,
    "cache__block_size": 2,
    "model__max_model_len": 24,
    "scheduler__max_num_seqs": 2,
    "scheduler__max_num_batched_tokens": 16,
    "speculative__num_speculative_tokens": 2,
}


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.parametrize(
    "method", ["eagle", *(pytest.param(method, marks=pytest.mark.slow) for method in ("medusa", "draft_model"))]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in padding, whose attention nobody computes
def test_tokens_are_the_dense_model_s(host: EngineHost, tmp_path: Path, method: str) -> None:
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
    model = make_tiny_llama(tmp_path / "model", **shape, num_attention_heads=14, num_key_value_heads=2, head_dim=20)
    oracle, folder = load_oracle(model), model
    if method in KINDS:
        head = random_head(method, DenseTarget.load(resolve_source(str(model)), CPU), (1, 2))
        folder = save(tmp_path / "head", head, method, model, torch.arange(0, 272, 2), (1, 2))
    expected = {key: dense_greedy(oracle, prompt, 5) for key, prompt in PROMPTS.items()}
    with recorded_graphs(on_kernels=True) as replays:
        host.load(config_of(model, **SMALL, speculative__method=method, speculative__model=str(folder)))
        replays.clear()
        collected, rounds = answers_and_rounds(host, PROMPTS, max_tokens=5, ignore_eos=True)
        host.unload()
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert replays["round_graphs"] >= 2
    if method in KINDS:
        check_drafts(load_drafter(folder, model), PROMPTS, collected, rounds)
    else:
        assert sum(it.num_accepted for it in rounds) == sum(len(it.draft_token_ids) for it in rounds) > 3


def test_drafts_that_the_device_looks_up(host: EngineHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that goes round in circles of six: beside a request that has to find that out, one that begins with a circle."""
    circle = [10, 11, 12, 13, 14, 15]
    model, calls = make_scripted(tmp_path / "model", [[*circle, circle[0]]]), count_rounds(monkeypatch)
    prompts = {"one": [12], "longer": [*circle, 10]}
    with recorded_graphs(on_kernels=True):
        host.load(config_of(model, **SMALL, speculative__method="ngram", scheduler__async_scheduling=True))
        collected, rounds = answers_and_rounds(host, prompts, max_tokens=16, ignore_eos=True)
        host.unload()
    assert collected["one"].token_ids == [circle[(3 + index) % 6] for index in range(16)]
    assert collected["longer"].token_ids == [circle[(1 + index) % 6] for index in range(16)]
    assert {it.request_id for it in rounds} == set(prompts)
    assert all(it.num_accepted == len(it.draft_token_ids) for it in rounds)
    assert calls["repeat"] >= 3
