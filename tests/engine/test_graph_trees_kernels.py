"""What rounds of trees in graphs run, over the Triton kernels, on a CPU through the interpreter."""

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
from backend.spec_decode.draft_tree import DraftTree  # noqa: E402
from backend.spec_decode.heads.head_config import HeadKind  # noqa: E402
from backend.spec_decode.heads.target import DenseTarget  # noqa: E402
from tests.engine.heads import answers_and_rounds, growing, plant_paths, random_head, save  # noqa: E402
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama  # noqa: E402
from tests.spec_decode.tiny_heads import CPU  # noqa: E402
from tests.worker.recorded_graphs import recorded_graphs  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="through the interpreter; test_graph_trees_gpu.py has kernels"
    ),
    pytest.mark.slow,
]

PROMPTS = {"one": [200], "longer": [*range(30, 39)]}
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1]])
SMALL: dict[str, Any] = {
    "kernels__backend": "triton",
    "kernels__enforce_eager": True,
    "cache__block_size": 2,
    "model__max_model_len": 24,
    "scheduler__max_num_seqs": 2,
    "scheduler__max_num_batched_tokens": 16,
}


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.slow), "medusa"])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in padding, whose attention nobody computes
def test_tokens_are_the_dense_model_s(
    host: EngineHost, tmp_path: Path, kind: HeadKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
    model = make_tiny_llama(tmp_path / "model", **shape, num_attention_heads=14, num_key_value_heads=2, head_dim=20)
    head = random_head(kind, DenseTarget.load(resolve_source(str(model)), CPU), (1, 2))
    folder = save(tmp_path / "head", head, kind, model, torch.arange(272), (1, 2))
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 9) for key, prompt in PROMPTS.items()}
    plant_paths(monkeypatch, TREE, {key: [*PROMPTS[key], *expected[key]] for key in PROMPTS}, [5, 4, 3])
    monkeypatch.setattr("backend.speculative_settings.DEFAULT_TREES", {kind: TREE})
    with recorded_graphs(on_kernels=True) as replays:
        host.load(growing(model, kind, folder, **SMALL))
        replays.clear()
        collected, rounds = answers_and_rounds(host, PROMPTS, max_tokens=9, ignore_eos=True)
        host.unload()
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert replays["tree_graphs"] >= 6
    assert max(it.num_accepted for it in rounds) == 2
    assert sum(it.num_accepted for it in rounds) > 6
