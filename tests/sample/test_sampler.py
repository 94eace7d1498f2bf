from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats

from backend.sample.metadata import SamplingMetadata, SamplingTensors
from backend.sample.random import Purpose, uniform
from backend.sample.sampler import REFERENCE_OPS, Sampler, SamplerOps, triton_ops
from backend.sampling_params import SamplingParams

CPU = torch.device("cpu")


def sample(logits: torch.Tensor, rows: list[dict[str, Any]], positions: list[int] | None = None) -> list[int]:
    metadata = SamplingMetadata([SamplingParams(**row) for row in rows], positions or [0] * len(rows), [()] * len(rows))
    return Sampler()(logits.float().clone(), metadata).token_ids.tolist()


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The target distribution by transformers' own processors, the oracle for filtering."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 5, 1.0), (1.3, -1, 0.8), (0.9, 12, 0.9), (1.0, 40, 1.0), (100.0, -1, 1.0)],
)
def test_draws_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(24) * 2
    expected = filtered(logits, temperature, top_k, top_p)
    count = 8000
    row = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens = sample(logits.repeat(count, 1), [row] * count, list(range(count)))
    counts = torch.bincount(torch.tensor(tokens), minlength=24)
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a filtered token was drawn"
    enough = kept & (expected * count >= 5)
    observed, wanted = counts[enough].double(), expected[enough] * count
    observed = torch.cat((observed, (count - observed.sum())[None]))
    wanted = torch.cat((wanted, (count - wanted.sum())[None]))
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed.numpy(), wanted.numpy(), sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("vocab_size", [8, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edge_values_side_by_side_in_one_batch(vocab_size: int, dtype: torch.dtype) -> None:
    """No NaN, no index past the vocabulary, and each row as if it were alone.

    Tiny temperatures overflow (karpathy/nanoGPT#738), a top-p near 1 is never reached (NVIDIA/TensorRT-LLM#19496), a
    top-k above the vocabulary raises (TransformerLensOrg/TransformerLens#1347).
    """
    torch.manual_seed(2)
    rows = [
        {"temperature": t, "top_p": p, "top_k": k}
        for t in (0.0, 1e-8, 1e-4, 1.0, 100.0)
        for p in (1e-9, 0.5, 1 - 1e-7, 1.0)
        for k in (-1, 0, 1, vocab_size - 1, vocab_size, vocab_size + 10)
    ][:: 1 if vocab_size == 8 else 7]
    logits = torch.randn(len(rows), vocab_size).to(dtype)
    tokens = sample(logits, rows)
    assert all(0 <= token < vocab_size for token in tokens)
    argmax = logits.float().argmax(-1).tolist()
    for index, row in enumerate(rows):
        if row["temperature"] <= 1e-8 or row["top_k"] == 1 or row["top_p"] == 1e-9:
            assert tokens[index] == argmax[index]
        assert tokens[index] == sample(logits[index : index + 1], [row])[0]


def test_equal_logits_give_the_lowest_id_to_greedy_and_every_id_to_sampling() -> None:
    logits = torch.zeros(400, 8)
    assert set(sample(logits, [{"temperature": 0.0}] * 400)) == {0}
    assert set(sample(logits, [{"temperature": 1.0, "seed": n} for n in range(400)])) == set(range(8))
    assert sample(logits[:1], [{"temperature": 1.0, "top_k": 1}]) == [0]


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, -math.inf]])
    assert sample(logits, [{"temperature": 1e-4}]) == [0]
    assert sample(logits, [{"temperature": 100.0}]) == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_named_and_its_neighbours_are_unharmed(bad: float) -> None:
    logits = torch.randn(3, 16)
    expected = logits.argmax(-1).tolist()
    logits[1, 7] = bad
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.0)]
    output = Sampler()(logits, SamplingMetadata(params, [0] * 3, [()] * 3))
    assert output.finite.tolist() == [True, False, True]
    assert output.token_ids[[0, 2]].tolist() == [expected[0], expected[2]]


def test_banned_ids_are_never_chosen_and_banning_all_is_reported() -> None:
    logits = torch.zeros(2, 4)
    logits[:, 2] = 50.0
    params = [SamplingParams(), SamplingParams(temperature=1.0)]
    output = Sampler()(logits, SamplingMetadata(params, [0, 0], [(2,), (0, 1, 2)]))
    assert output.token_ids.tolist() == [0, 3]
    output = Sampler()(torch.zeros(1, 2), SamplingMetadata(params[:1], [0], [(0, 1)]))
    assert output.finite.tolist() == [False]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0])
def test_large_vocabularies_keep_exactly_the_nucleus(top_p: float, spread: float) -> None:
    """Flat and peaked distributions over 20,000 tokens: every draw lies in the nucleus found by a full sort."""
    torch.manual_seed(3)
    logits = torch.randn(20_000) * spread
    probs = logits.double().softmax(-1)
    ordered, order = probs.sort(descending=True, stable=True)
    nucleus = set(order[: int((ordered.cumsum(0) - ordered < top_p).sum()) + 1].tolist())
    drawn = sample(logits.repeat(40, 1), [{"temperature": 1.0, "top_p": top_p, "seed": n} for n in range(40)])
    assert set(drawn) <= nucleus
    if len(nucleus) > 2000 and spread <= 1:
        assert len(set(drawn)) > 30


def test_the_tie_rule_of_top_k_is_the_lowest_ids() -> None:
    logits = torch.zeros(1000)
    logits[500:] = 1.0
    drawn = sample(logits.repeat(300, 1), [{"temperature": 1.0, "top_k": 4, "seed": n} for n in range(300)])
    assert set(drawn) == {500, 501, 502, 503}


def test_parameters_become_tensors_row_by_row() -> None:
    params = [
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=2**63 - 1),
        SamplingParams(),
        SamplingParams(temperature=1e6, top_k=2**40, seed=5),
    ]
    tensors = SamplingTensors.build(SamplingMetadata(params, [3, 0, 2**33], [()] * 3), CPU)
    assert tensors is not None
    assert torch.equal(tensors.temperature, torch.tensor([0.7, 0.0, 1e6]))
    assert torch.equal(tensors.top_k, torch.tensor([40, -1, 2**31 - 1], dtype=torch.int32))
    assert torch.equal(tensors.top_p, torch.tensor([0.9, 1.0, 1.0]))
    assert tensors.draws.tolist() == uniform([2**63 - 1, 0, 5], [3, 0, 2**33], Purpose.TOKEN).tolist()


def test_greedy_rows_alone_have_no_draws() -> None:
    assert SamplingTensors.build(SamplingMetadata([SamplingParams()] * 2, [0, 1], [()] * 2), CPU) is None


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_batch_of_any_number_of_rows_samples(num_rows: int) -> None:
    """The buffer that carries the parameters holds numbers of 8 bytes and of 4."""
    tokens = sample(torch.zeros(num_rows, 50), [{"temperature": 1.0, "seed": row} for row in range(num_rows)])
    draws = uniform(list(range(num_rows)), [0] * num_rows, Purpose.TOKEN)
    assert tokens == [int(50 * draw) for draw in draws.tolist()]


def test_greedy_rows_alone_need_neither_draws_nor_weights() -> None:
    calls = []

    def greedy_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("greedy_tokens")
        return REFERENCE_OPS.greedy_tokens(logits)

    def sample_tokens(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("sample_tokens")
        return REFERENCE_OPS.sample_tokens(*arguments)

    sampler = Sampler(SamplerOps(greedy_tokens, sample_tokens))
    for temperatures, expected in (((0.0, 1e-8), "greedy_tokens"), ((0.0, 1.0), "sample_tokens")):
        calls.clear()
        params = [SamplingParams(temperature=temperature) for temperature in temperatures]
        sampler(torch.randn(2, 8), SamplingMetadata(params, [0, 0], [(), ()]))
        assert calls == [expected]


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_tokens_are_the_cpus() -> None:
    torch.manual_seed(5)
    logits = torch.randn(64, 49_152)
    params = [
        SamplingParams(temperature=row % 4 / 2, top_k=(-1, 50)[row % 2], top_p=(1.0, 0.9, 0.5)[row % 3], seed=row)
        for row in range(64)
    ]
    metadata = SamplingMetadata(params, list(range(64)), [(row, 7) if row % 5 == 0 else () for row in range(64)])
    sampler, on_device = Sampler(triton_ops()), logits.cuda()
    sampler(on_device.clone(), metadata)  # compiles
    inputs = on_device.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = sampler(inputs, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = Sampler()(logits, metadata)
    # A draw within 1e-6 of an edge may fall on either side.
    assert (output.token_ids.cpu() != expected.token_ids).sum() <= 1
    assert output.finite.all()
    assert torch.equal(inputs.cpu(), logits)


@pytest.mark.gpu
def test_on_a_gpu_one_kernel_serves_every_number_of_rows() -> None:
    """Where the parameters begin in the one buffer that is copied depends on that number; compiling takes a second."""
    from kernels.ops.sample_tokens import _sample_tokens_kernel  # needs triton

    sampler, logits = Sampler(triton_ops()), torch.randn(9, 49_152).cuda()
    compiled = _sample_tokens_kernel.device_caches[torch.cuda.current_device()][0]
    num_compiled = []
    for num_rows in range(1, 10):
        params = [SamplingParams(temperature=0.8, seed=row) for row in range(num_rows)]
        sampler(logits[:num_rows].clone(), SamplingMetadata(params, [0] * num_rows, [()] * num_rows))
        num_compiled.append(len(compiled))
    assert len(set(num_compiled)) == 1
