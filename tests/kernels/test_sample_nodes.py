from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.sample.random import Purpose, uniform
from kernels.reference.sample_tokens import sample_tokens
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["sample_nodes"]
IMPLEMENTATIONS = ["reference", "launch"]
CHAIN = (-1, 0, 1, 2, 3, 4)
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)


def depths_of(parents: tuple[int, ...]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def make(
    parents: tuple[int, ...], rows: list[tuple[float, int, float, int]], device: torch.device
) -> dict[str, Tensor]:
    """Of (temperature, top-k, top-p, seed) rows; drafts are of any likelihood."""
    num_rows, num_nodes, vocab_size = len(rows), len(parents), 70
    logits = torch.randn(num_rows * num_nodes, vocab_size, device=device).mul(2)
    temperature, top_k, top_p, seeds = zip(*rows, strict=True)
    prompts = torch.randint(1, 50, (num_rows,), device=device)
    return {
        "logits": logits.mul(4).round().div(4),  # with equal ones
        "draft_token_ids": torch.randint(vocab_size, (num_rows, num_nodes - 1), device=device),
        "parents": torch.tensor(parents, device=device),
        "depths": torch.tensor(depths_of(parents), device=device),
        "temperature": torch.tensor(temperature, dtype=torch.float32, device=device),
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=device),
        "top_p": torch.tensor(top_p, dtype=torch.float32, device=device),
        "seeds": torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)).to(device),
        "num_prompt_tokens": prompts,
        "num_computed": prompts + torch.randint(500, (num_rows,), device=device),
    }


ROWS = [
    (1.0, -1, 1.0, 3),
    (0.7, 5, 1.0, 2**64 - 1),
    (0.0, -1, 1.0, 4),
    (1.3, -1, 0.8, 2**63),
    (0.9, 12, 0.6, 2**32 + 7),
]


def plain_draws(inputs: dict[str, Tensor]) -> Tensor:
    """float64 [num_rows, num_nodes]: what plain decoding draws, by the host's generator."""
    base = inputs["num_computed"] + 1 - inputs["num_prompt_tokens"]
    positions = base[:, None] + inputs["depths"]
    seeds = inputs["seeds"].cpu().numpy().view(np.uint64)
    drawn = [
        uniform([int(seed)] * positions.shape[1], row, Purpose.TOKEN)
        for seed, row in zip(seeds, positions.tolist(), strict=True)
    ]
    return torch.from_numpy(np.stack(drawn)).to(positions.device)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("parents", [CHAIN, TREE, (-1, 0)])
def test_tokens_are_those_of_plain_decoding(parents: tuple[int, ...], which: str, device: torch.device) -> None:
    """With the seeds and positions that it has, over all bits of a seed."""
    torch.manual_seed(0)
    inputs, num_nodes = make(parents, ROWS * 3, device), len(parents)
    found = getattr(OP, which)(**inputs)
    rows = {name: inputs[name].repeat_interleave(num_nodes) for name in ("temperature", "top_k", "top_p")}
    expected, _ = sample_tokens(inputs["logits"], **rows, draws=plain_draws(inputs).flatten())
    is_sampled = inputs["temperature"] > 0
    assert torch.equal(found.token_ids[is_sampled], expected.view(-1, num_nodes)[is_sampled])
    assert (found.token_ids[~is_sampled] == -1).all()
    assert (found.probs[~is_sampled] == 0).all()


def law(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """By sorting, token by token."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[:top_k] if 0 < top_k < len(order) else order
    weights = {token: math.exp((logits[token] - max(logits)) / temperature) for token in order}
    kept, before, total = [], 0.0, sum(weights.values())
    for token in order:
        if top_p < 1 and before >= top_p * total:
            break
        kept.append(token)
        before += weights[token]
    return [weights[token] / before if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("parents", [CHAIN, TREE])
def test_probabilities_are_the_target_s_after_its_filters(
    parents: tuple[int, ...], which: str, device: torch.device
) -> None:
    torch.manual_seed(1)
    inputs, num_nodes = make(parents, ROWS * 2, device), len(parents)
    inputs["draft_token_ids"][0, 1] = 2**40  # padding
    found = getattr(OP, which)(**inputs)
    scores = inputs["logits"].view(-1, num_nodes, 70).tolist()
    drafts = inputs["draft_token_ids"].tolist()
    num_filtered = 0
    for row, (temperature, top_k, top_p, _) in enumerate(ROWS * 2):
        for child in range(1, num_nodes):
            token = drafts[row][child - 1]
            expected = 0.0
            if temperature > 0 and token < 70:
                expected = law(scores[row][parents[child]], temperature, top_k, top_p)[token]
                num_filtered += expected == 0
            assert found.probs[row, child - 1].item() == pytest.approx(expected, abs=1e-6)
    assert num_filtered > 5


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_the_share_of_drafts_that_are_drawn_is_their_probability(which: str, device: torch.device) -> None:
    """Over seeds, of a draft whose probability is a half: within five standard deviations."""
    num_rows = 150
    logits = torch.full((num_rows * 2, 8), -math.inf, device=device)
    logits[:, 2], logits[:, 6] = 1.0, 1.0
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    found = getattr(OP, which)(
        logits=logits,
        draft_token_ids=(zeros + 6)[:, None],
        parents=torch.tensor([-1, 0], device=device),
        depths=torch.tensor([0, 1], device=device),
        temperature=torch.ones(num_rows, device=device),
        top_k=zeros.int(),
        top_p=torch.ones(num_rows, device=device),
        seeds=torch.arange(num_rows, device=device),
        num_prompt_tokens=zeros + 3,
        num_computed=zeros + 9,
    )
    assert (found.probs - 0.5).abs().max() < 1e-6
    for place in range(2):
        share = (found.token_ids[:, place] == 6).float().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(num_rows)
    assert 0.25 < (found.token_ids[:, 0] == found.token_ids[:, 1]).float().mean() < 0.75, "positions draw by themselves"


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_where_logits_are_not_usable_nothing_is_sampled(which: str, device: torch.device) -> None:
    torch.manual_seed(2)
    inputs = make(CHAIN, ROWS[:1], device)
    for node, value in ((1, math.nan), (2, math.inf)):
        inputs["logits"][node, 5] = value
    inputs["logits"][3] = -math.inf
    found = getattr(OP, which)(**inputs)
    assert (found.token_ids[0] >= 0).tolist() == [True, False, False, False, True, True]
    assert (found.probs[0, 1:4] == 0).all()


def test_kernels_write_nothing_but_their_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    bands = GuardBands(value=77)
    inputs = {name: bands.wrap(it) for name, it in make(TREE, ROWS, device).items()}
    before = {name: it.clone() for name, it in inputs.items()}
    expected = OP.reference(**inputs)
    monkeypatch.setattr(torch, "empty", bands.empty)
    found = OP.launch(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert torch.equal(found.token_ids, expected.token_ids)  # type: ignore[union-attr]
    assert all(torch.equal(before[name], it) for name, it in inputs.items())


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    inputs = {name: it if name in ("parents", "depths") else it[:0] for name, it in make(CHAIN, ROWS, device).items()}
    assert getattr(OP, which)(**inputs).token_ids.shape == (0, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(5, 8)}, r"logits has shape \[5, 8\]; expected \[6, any\]"),
        ({"logits": torch.zeros(6, 0)}, "logits has 0 columns; at least 1 is expected"),
        ({"draft_token_ids": torch.zeros(1, 4).long()}, r"draft_token_ids has shape \[1, 4\]; expected \[1, 5\]"),
        ({"parents": torch.zeros(65).long()}, "parents has 65 entries; 2 to 64 are expected"),
        ({"depths": torch.zeros(6).int()}, "depths is int32; expected int64"),
        ({"temperature": torch.zeros(1).double()}, "temperature is float64; expected float32"),
        ({"seeds": torch.zeros(1)}, "seeds is float32; expected int64"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    launch: Callable[..., Any] = OP.launch
    inputs = make(CHAIN, ROWS[:1], torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        launch(**(inputs | change))
