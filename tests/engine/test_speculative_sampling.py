"""Sampled speculation in a real engine: outputs have the law of the dense model, whatever drafts."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.engine_host import EngineHost
from backend.spec_decode.proposer import DraftRequest
from tests.engine.driving import answers, config_of
from tests.engine.speculating import ScriptedProposer, in_turn
from tests.engine.test_samples import submit_samples
from tests.helpers import dense_logits, load_oracle

PROMPT = [10, 20, 30, 10, 20]
TOP_K, TEMPERATURE, LENGTH = 3, 1.5, 4
NUM_SAMPLES = 20 * 64


@pytest.fixture(scope="module")
def law(tiny_llama: Path) -> dict[tuple[int, ...], float]:
    return law_of(tiny_llama)


def law_of(model: Path, prompt: Sequence[int] = PROMPT) -> dict[tuple[int, ...], float]:
    """The probability of each output, by transformers' logits along the tree of all of them."""
    oracle = load_oracle(model)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for output, probability in found.items():
            logits = dense_logits(oracle, [*prompt, *output])[-1] / TEMPERATURE
            best = logits.topk(TOP_K)
            for share, token_id in zip(torch.softmax(best.values, 0).tolist(), best.indices.tolist(), strict=True):
                grown[*output, token_id] = probability * share
        found = grown
    return found


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Statistic and degrees of freedom, cells pooled in order of their probability until each expects 5 at least."""
    total, statistic, num_cells = sum(counts.values()), 0.0, 0
    expected, observed = 0.0, 0
    cells = sorted(law, key=law.__getitem__)
    left = sum(law.values()) * total
    for cell in cells:
        expected, observed, left = expected + law[cell] * total, observed + counts[cell], left - law[cell] * total
        if expected >= 5 and (left >= 5 or cell == cells[-1]):
            statistic += (observed - expected) ** 2 / expected
            num_cells, expected, observed = num_cells + 1, 0.0, 0
    return statistic, num_cells - 1


def too_large(degrees: int) -> float:
    """A bound that a true sampler passes but once in 30,000 seeds (normal approximation of Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.0 * math.sqrt(2 / (9 * degrees))) ** 3


class LikeliestProposer(ScriptedProposer):
    """Drafts the likeliest output that goes on like the text, without a draw."""

    def __init__(self, law: dict[tuple[int, ...], float]) -> None:
        super().__init__([], in_turn((2, 2)))
        self._law = law

    def _draft(self, request: DraftRequest) -> list[int]:
        output = tuple(self._texts[request.request_id][len(PROMPT) :])
        likeliest = max((it for it in self._law if it[: len(output)] == output), key=self._law.__getitem__)
        return list(likeliest[len(output) : len(output) + request.max_tokens])


def similar_llama(tiny_llama: Path, folder: Path) -> Path:
    """The same with noise on its weights."""
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for tensor in weights.values():
        tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("proposer", ["none", "point mass", "first layers", "similar model"])
def test_outputs_have_the_law_of_the_dense_model(
    host: EngineHost,
    tmp_path: Path,
    tiny_llama: Path,
    law: dict[tuple[int, ...], float],
    proposer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"scheduler__max_num_seqs": 64}
    if proposer != "none":
        method = "ngram" if proposer == "point mass" else "draft_model"
        options |= {"speculative__method": method, "speculative__num_speculative_tokens": 2}
    if proposer == "point mass":
        monkeypatch.setattr("backend.worker.speculative_runner.NgramProposer", lambda *_: LikeliestProposer(law))
    if proposer == "similar model":
        options["speculative__model"] = str(similar_llama(tiny_llama, tmp_path / "draft"))
    host.load(config_of(tiny_llama, **options))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": LENGTH, "ignore_eos": True}
    for seed in range(NUM_SAMPLES // 64):
        for answer in submit_samples(host, "a", PROMPT, 64, seed=1000 + seed, **sampling).values():
            assert answer.finish_reason == "length"
            counts[tuple(answer.token_ids)] += 1
            accepted += answer.last.speculation.num_accepted_tokens if answer.last.speculation else 0
    assert sum(counts.values()) == NUM_SAMPLES
    assert set(counts) <= set(law)
    assert proposer == "none" or accepted > (10 if proposer == "first layers" else 250)
    statistic, degrees = chi_square(counts, law)
    assert degrees > 20
    assert statistic < too_large(degrees)


def test_a_row_that_drafts_nothing_gives_the_plain_tokens(host: EngineHost, tiny_llama: Path) -> None:
    """Up to the first draft, and everywhere with a budget that has none left, a seed's tokens are those without speculation."""
    prompts = {str(index): [index, 7, index] for index in range(6)}
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 16, "ignore_eos": True}
    host.load(config_of(tiny_llama, scheduler__max_num_batched_tokens=1))
    plain = answers(host, prompts, **sampling)
    host.load(config_of(tiny_llama, scheduler__max_num_batched_tokens=1, speculative__method="ngram"))
    drafted = answers(host, prompts, **sampling)
    assert [it.token_ids for it in drafted.values()] == [it.token_ids for it in plain.values()]
    assert {it.last.speculation for it in drafted.values()} == {(0, 0, 0)}
