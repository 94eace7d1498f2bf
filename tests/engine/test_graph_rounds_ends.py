"""The end of the context inside a round of speculation that runs in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.engine.engine_host import EngineHost
from backend.models.sources import resolve_source
from backend.spec_decode.heads.head_config import HeadKind
from backend.spec_decode.heads.target import DenseTarget
from tests.engine.driving import answers
from tests.engine.heads import KINDS, answers_and_rounds, heading, random_head, save
from tests.engine.speculating import in_turn, scripted
from tests.helpers import dense_greedy
from tests.spec_decode.tiny_heads import CPU, random_ids
from tests.worker.recorded_graphs import recorded_graphs

from backend.worker.round_graphs import RoundGraphs  # isort: skip  # noqa: F401  # once the kernels are the interpreter's

CONTEXT = 64
OPTIONS = {"model__max_model_len": CONTEXT, "scheduler__max_num_seqs": 5}
PROMPTS = {f"p{length}": random_ids(512, length, seed=length).tolist() for length in (40, 57, 58, 62, 63)}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    return {key: dense_greedy(tiny_llama, prompt, CONTEXT - len(prompt)) for key, prompt in PROMPTS.items()}


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_sd_5_drafts_reach_to_the_end_and_not_beyond(
    tiny_llama: Path, expected: dict[str, list[int]], num_right: int
) -> None:
    """Far more tokens are asked for than there is room for, beside requests that have a little more of it."""
    scripts = [[*prompt, *expected[key]] for key, prompt in PROMPTS.items()]
    with recorded_graphs() as replays:
        host = EngineHost()
        with scripted(host, tiny_llama, scripts, in_turn((5, num_right)), **OPTIONS):
            collected = answers(host, PROMPTS, max_tokens=50, ignore_eos=True)
        host.close()
    for key, answer in collected.items():
        assert (answer.token_ids, answer.finish_reason) == (expected[key], "length")
    assert replays["round_graphs"] > 3


@pytest.mark.parametrize("kind", KINDS)
def test_sd_5_a_head_drafts_to_the_end_and_not_beyond(
    tmp_path: Path, tiny_llama: Path, expected: dict[str, list[int]], kind: HeadKind
) -> None:
    target = DenseTarget.load(resolve_source(str(tiny_llama)), CPU)
    head = save(tmp_path / "head", random_head(kind, target), kind, tiny_llama, torch.arange(0, 512, 2))
    with recorded_graphs() as replays:
        host = EngineHost()
        host.load(heading(tiny_llama, kind, head, **OPTIONS))
        collected, rounds = answers_and_rounds(host, PROMPTS, max_tokens=50, ignore_eos=True)
        host.close()
    for key, answer in collected.items():
        assert (answer.token_ids, answer.finish_reason) == (expected[key], "length")
    ends = {len(PROMPTS[it.request_id]) + it.position + len(it.draft_token_ids) for it in rounds}
    assert max(ends) == CONTEXT - 1, "one token of the room left is the target's own"
    assert replays["round_graphs"] > 3
