from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

IMPLEMENTATIONS = ["reference", "launch"]


def implementation(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(REGISTRY["sample_tokens"], name)


def arguments(logits: Tensor, rows: list[tuple[float, int, float, float]]) -> dict[str, Tensor]:
    """`rows` holds temperature, top_k, top_p and draw of each."""
    temperature, top_k, top_p, draws = zip(*rows, strict=True)
    device = logits.device
    return {
        "logits": logits,
        "temperature": torch.tensor(temperature, dtype=torch.float32, device=device),
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=device),
        "top_p": torch.tensor(top_p, dtype=torch.float32, device=device),
        "draws": torch.tensor(draws, dtype=torch.float64, device=device),
    }


def kept_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """By a full sort in float64: probabilities, zero where filtered out, and how close the nucleus came to its edge."""
    x = logits.cpu().double().numpy()
    with np.errstate(over="ignore"):
        weights = np.exp((x - x.max()) / float(np.float32(temperature)))
    order = np.lexsort((np.arange(len(x)), -x))
    if 0 < top_k < len(x):
        order = order[:top_k]
    margin = 1.0
    if top_p < 1:
        cumulative = weights[order].cumsum()
        before, target = np.concatenate(([0.0], cumulative[:-1])), float(np.float32(top_p)) * cumulative[-1]
        margin = float(np.abs(before - target).min() / cumulative[-1])
        order = order[: max(1, int((before < target).sum()))]
    probabilities = np.zeros(len(x))
    probabilities[order] = weights[order] / weights[order].sum()
    return probabilities, margin


def inverted(probabilities: np.ndarray, draw: float) -> tuple[int, float]:
    """The first id whose cumulative probability exceeds the draw, and how close another came to be it."""
    cumulative = probabilities.cumsum()
    token_id = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return min(token_id, int(probabilities.nonzero()[0][-1])), float(np.abs(cumulative - draw).min())


def random_row(rng: random.Random, generator: torch.Generator) -> tuple[Tensor, tuple[float, int, float, float]]:
    """Flat, peaked, rounded, far apart, partly -inf, with outliers: what a search for a threshold might stumble over."""
    vocab_size = rng.choice([1, 2, 3, 8, 50, 300, 2049, 5000])
    logits = torch.randn(vocab_size, generator=generator) * rng.choice([0, 1e-3, 0.1, 1, 4, 50])
    if rng.random() < 0.3:
        logits = (logits * 2).round() / 2
    if rng.random() < 0.3:
        logits[rng.randrange(vocab_size)] = rng.choice([-1e30, -3e38, 50, 1e4, 3e38])
    if rng.random() < 0.3:
        logits[torch.rand(vocab_size, generator=generator) < rng.choice([0.1, 0.9])] = -math.inf
    if rng.random() < 0.2:
        logits[torch.rand(vocab_size, generator=generator) < 0.5] *= 1e-20
    if not logits.max().isfinite():
        logits[0] = 0.0
    temperature = rng.choice([1e-4, 0.1, 0.7, 1, 3, 100, 1e6])
    top_k = rng.choice([-1, -1, 0, 1, 2, 7, vocab_size // 3, vocab_size - 1, vocab_size, vocab_size + 10])
    top_p = rng.choice([1, 1, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7])
    return logits, (temperature, top_k, top_p, rng.random())


@pytest.mark.parametrize(("which", "count"), [("reference", 600), ("launch", 60)])
def test_draws_what_a_full_sort_in_float64_draws(which: str, count: int, device: torch.device) -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    num_compared = 0
    for _ in range(count):
        logits, row = random_row(rng, generator)
        probabilities, margin = kept_probabilities(logits, *row[:3])
        expected, distance = inverted(probabilities, row[3])
        token_ids, finite = implementation(which)(**arguments(logits[None].to(device), [row]))
        assert finite.tolist() == [True]
        assert probabilities[int(token_ids)] > 0 or margin < 1e-6, (logits, row)
        if min(margin, distance) > 1e-6:
            num_compared += 1
            assert int(token_ids) == expected, (logits, row)
    assert num_compared > 0.7 * count


FILTERS = [(1.0, -1, 1.0), (0.7, 12, 1.0), (1.3, -1, 0.8), (0.9, 12, 0.9)]


@pytest.mark.parametrize(("which", "count"), [("reference", 1000), ("launch", 31)])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
def test_evenly_spaced_draws_are_shared_out_as_the_filtered_distribution_says(
    temperature: float, top_k: int, top_p: float, which: str, count: int, device: torch.device
) -> None:
    """Among `count` points of [0, 1), an interval of width p holds `count * p`, less than one more or fewer."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)).to(device) * 2
    probabilities, _ = kept_probabilities(logits, temperature, top_k, top_p)
    rows = [(temperature, top_k, top_p, (index + 0.5) / count) for index in range(count)]
    token_ids, _ = implementation(which)(**arguments(logits.expand(count, -1), rows))
    assert token_ids.tolist() == sorted(token_ids.tolist())  # in order of id
    counts = np.bincount(token_ids.cpu().numpy(), minlength=24)
    assert counts[probabilities == 0].sum() == 0
    assert np.abs(counts - count * probabilities).max() < 1 + count * 1e-6  # weights are fp32


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (8, torch.float32),
        pytest.param(151_936, torch.float32, marks=pytest.mark.slow),
        pytest.param(151_936, torch.bfloat16, marks=pytest.mark.slow),  # where many are equal
    ],
)
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_edge_values_side_by_side_in_one_batch(
    which: str, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows = [
        (temperature, top_k, top_p, draw)
        for temperature in (0.0, 1e-8, 1e-4, 1.0, 100.0)
        for top_p in (1e-9, 0.5, 1 - 1e-7, 1.0)
        for top_k in (-1, 0, 1, vocab_size - 1, vocab_size, vocab_size + 10)
        for draw in (0.0, 1 - 2**-53)
    ]
    rows = rows[:: 23 if vocab_size > 8 else 11 if which == "launch" else 1]
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(len(rows), vocab_size, generator=generator).to(dtype).float().to(device)
    token_ids, finite = implementation(which)(**arguments(logits, rows))
    assert finite.all()
    argmax = logits.argmax(-1).tolist()
    for index, (token_id, row) in enumerate(zip(token_ids.tolist(), rows, strict=True)):
        temperature, top_k, top_p, draw = row
        if temperature <= 1e-8 or top_k == 1 or top_p == 1e-9:
            assert token_id == argmax[index]
        else:
            probabilities, _ = kept_probabilities(logits[index], temperature, top_k, top_p)
            beyond = probabilities[:token_id] if draw == 0 else probabilities[token_id + 1 :]
            assert beyond.sum() < 1e-6
        alone, _ = implementation(which)(**arguments(logits[index : index + 1], [row]))
        assert int(alone) == token_id


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_equal_logits_are_kept_by_lowest_id(which: str, device: torch.device) -> None:
    logits = torch.zeros(1, 5000, device=device)
    logits[:, 4500:] = 1.0
    last = 1 - 2**-53
    share = 100.5 / (500 + 4500 / math.e)
    for (top_k, top_p), expected in {(4, 1.0): 4503, (500, 1.0): 4999, (-1, share): 4600, (200, 0.3975): 4579}.items():
        for draw, wanted in ((0.0, 4500), (last, expected)):
            token_ids, _ = implementation(which)(**arguments(logits, [(1.0, top_k, top_p, draw)]))
            assert int(token_ids) == wanted
    # Beyond the largest: the first three of those that come next.
    token_ids, _ = implementation(which)(**arguments(logits, [(1.0, 503, 1.0, 0.0)]))
    assert int(token_ids) == 0
    below = 3 / math.e / (3 / math.e + 500)
    token_ids, _ = implementation(which)(**arguments(logits, [(1.0, 503, 1.0, below * 0.99)]))
    assert int(token_ids) == 2


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_zero_and_minus_zero_are_equal(which: str, device: torch.device) -> None:
    logits = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -0.0]], device=device)
    for top_k, top_p, expected in ((2, 1.0, 2), (3, 0.5, 2), (4, 0.9, 4)):
        token_ids, _ = implementation(which)(**arguments(logits, [(1.0, top_k, top_p, 1 - 2**-53)]))
        assert int(token_ids) == expected


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_a_token_of_weight_zero_is_never_drawn(which: str, device: torch.device) -> None:
    logits = torch.tensor([[-1e4, 0.0, -1e4, 1.0, -math.inf, -1e4]], device=device)
    for draw, expected in ((0.0, 1), (1 - 2**-53, 3)):
        for top_k, top_p in ((-1, 1.0), (5, 1.0), (-1, 1 - 1e-7), (4, 1 - 1e-7)):
            token_ids, _ = implementation(which)(**arguments(logits, [(1.0, top_k, top_p, draw)]))
            assert int(token_ids) == expected


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_extreme_logits_stay_finite(which: str, device: torch.device) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, -math.inf]], device=device)
    for row in ((1e-4, -1, 1.0), (100.0, 2, 1.0), (100.0, -1, 0.5), (1.0, 3, 1 - 1e-7)):
        token_ids, finite = implementation(which)(**arguments(logits, [(*row, 0.999)]))
        assert (token_ids.tolist(), finite.tolist()) == ([0], [True])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_a_row_that_is_not_finite_is_named_and_its_neighbours_are_unharmed(
    which: str, bad: float, device: torch.device
) -> None:
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(device)
    rows = [(1.0, 5, 0.9, 0.3)] * 4
    expected, _ = implementation(which)(**arguments(logits, rows))
    logits[1, 7] = bad
    logits[2] = -math.inf
    token_ids, finite = implementation(which)(**arguments(logits, rows))
    assert finite.tolist() == [True, False, False, True]
    assert token_ids[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert ((token_ids >= 0) & (token_ids < 16)).all()


def test_kernel_reads_and_writes_its_rows_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = REGISTRY["sample_tokens"].make_inputs(torch.float32, device, num_rows=3)
    wide = torch.full((3, 1100), math.nan, device=device)
    wide[:, :999] = inputs["logits"]
    around = GuardBands()
    strided = {n: around.wrap(t) for n, t in inputs.items() if n in ("temperature", "top_p", "draws")}
    strided |= {"top_k": inputs["top_k"], "logits": wide[:, :999]}
    before = {name: tensor.clone() for name, tensor in strided.items()}
    expected, _ = implementation("reference")(**inputs)
    outputs = GuardBands(value=1.0)
    monkeypatch.setattr(torch, "empty", outputs.empty)
    token_ids, finite = implementation("launch")(**strided)
    monkeypatch.undo()
    outputs.assert_untouched()
    around.assert_untouched()
    assert torch.equal(token_ids, expected)
    assert finite.all()
    assert all(torch.equal(strided[name], before[name]) for name in before)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    inputs = REGISTRY["sample_tokens"].make_inputs(torch.float32, device, num_rows=0)
    token_ids, finite = implementation(which)(**inputs)
    assert (token_ids.shape, token_ids.dtype, finite.shape, finite.dtype) == ((0,), torch.int64, (0,), torch.bool)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 64).half()}, "logits is float16; expected float32"),
        ({"logits": torch.zeros(64, 2).t()}, "logits has stride 2 in its last dimension; expected 1"),
        ({"logits": torch.zeros(2, 0)}, "logits has 0 columns; at least 1 is expected"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \[3\]; expected \[2\]"),
        ({"temperature": torch.ones(2).double()}, "temperature is float64; expected float32"),
        ({"top_k": torch.ones(2).long()}, "top_k is int64; expected int32"),
        ({"top_p": torch.ones(2, 1)}, r"top_p has shape \[2, 1\]; expected \[2\]"),
        ({"draws": torch.zeros(2)}, "draws is float32; expected float64"),
        ({"draws": torch.zeros(2, device="meta").double()}, "draws is on meta; expected cpu"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = arguments(torch.zeros(2, 64), [(1.0, -1, 1.0, 0.5)] * 2)
    with pytest.raises(ValueError, match=message):
        REGISTRY["sample_tokens"].launch(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
def test_kernel_at_full_size_is_the_same_alone_captured_and_on_the_cpu(
    temperature: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(48, 128_256, generator=generator).mul(3).bfloat16().float()
    rows = [(temperature, top_k, top_p, draw) for draw in torch.rand(48, generator=generator).tolist()]
    inputs = arguments(logits.cuda(), rows)
    token_ids, _ = implementation("launch")(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = implementation("launch")(**inputs)
    graph.replay()
    assert torch.equal(captured, token_ids)
    for index, row in enumerate(rows):
        probabilities, margin = kept_probabilities(logits[index], *row[:3])
        expected, distance = inverted(probabilities, row[3])
        if min(margin, distance) > 1e-6:
            assert int(token_ids[index]) == expected
        alone, _ = implementation("launch")(**arguments(logits[index : index + 1].cuda(), [row]))
        assert int(alone) == int(token_ids[index])


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    vocab_size = 151_936
    num_rows = 2**31 // vocab_size + 2
    logits = torch.zeros(num_rows, vocab_size, device="cuda")
    logits[-1, 151_930:] = 20.0
    token_ids, finite = REGISTRY["sample_tokens"].launch(**arguments(logits, [(1.0, 6, 0.9, 0.999)] * num_rows))
    assert int(token_ids[-1]) == 151_935
    assert (token_ids[:-1] == 5).all()
    assert finite.all()
