from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from backend.sample.metadata import SamplingMetadata
from backend.sample.random import Purpose, uniform
from backend.sample.rejection_sampler import RejectionSampler
from backend.sample.sampler import Sampler, triton_ops
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams
from kernels.reference.sample_tokens import sample_tokens
from tests.sample.rounds import CPU, build, verify

# Against plain decoding


def rows_of_all_kinds(count: int, vocab_size: int) -> list[dict[str, Any]]:
    return [
        {
            "temperature": (1.0, 0.0, 0.3, 2.0, 1e-6)[row % 5],
            "top_k": (-1, 3, 40, 1, vocab_size + 5)[row // 5 % 5],
            "top_p": (1.0, 0.9, 0.5, 1e-6)[row // 25 % 4],
            "seed": row,
        }
        for row in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [13, 5000])
def test_a_row_without_a_draft_gets_the_plain_token(vocab_size: int) -> None:
    """Ties in the logits, every filter, any position. The reference goes through large vocabularies by histograms."""
    torch.manual_seed(4)
    count = 200
    logits = (torch.randn(count, 3, vocab_size) * 4).round() / 2
    rows, positions = rows_of_all_kinds(count, vocab_size), list(range(count))
    sampling = build(rows, 2, positions)
    output = verify(logits, [[-1, 7]] * count, sampling, torch.full((count, 2, vocab_size), math.nan), [0] * count)
    metadata = SamplingMetadata([SamplingParams(**row) for row in rows], positions, [()] * count)
    plain = Sampler()(logits[:, 0].clone(), metadata)
    assert output.token_ids.tolist() == [[token, -1, -1] for token in plain.token_ids.tolist()]
    assert output.num_accepted.tolist() == [0] * count
    assert output.finite.all()


def test_the_bonus_token_is_the_plain_token_of_its_position() -> None:
    torch.manual_seed(5)
    count, vocab_size = 60, 30
    logits = torch.randn(count, 3, vocab_size)
    drafts = torch.randint(vocab_size, (count, 2))
    logits[:, :2].scatter_(-1, drafts[:, :, None], 60.0)  # no doubt about them
    rows = [row | {"top_p": 0.9} for row in rows_of_all_kinds(count, vocab_size)]
    output = verify(logits, drafts.tolist(), build(rows, 2, [5] * count))
    metadata = SamplingMetadata([SamplingParams(**row) for row in rows], [7] * count, [()] * count)
    assert torch.equal(output.token_ids[:, :2], drafts)
    assert torch.equal(output.token_ids[:, 2], Sampler()(logits[:, 2].clone(), metadata).token_ids)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_recovered_token_inverts_the_residual_at_the_draw_of_its_position(place: int) -> None:
    """Refused at each place in turn; by hand in float64, with the counter-based draw for that position and purpose."""
    torch.manual_seed(11)
    count, vocab_size, begin = 40, 12, 9
    logits, q = torch.randn(count, 4, vocab_size) * 2, torch.randn(count, 3, vocab_size).softmax(-1)
    drafts = torch.randint(vocab_size, (count, 3))
    sampling = build([{"temperature": 1.0, "seed": row} for row in range(count)], 3, [begin] * count)
    accept_draws = torch.full((count, 3), -1.0, dtype=torch.float64)  # accepts
    accept_draws[:, place] = torch.inf
    output = verify(logits, drafts.tolist(), replace(sampling, accept_draws=accept_draws), q)
    draws = uniform(list(range(count)), [begin + place] * count, Purpose.RECOVERED)
    weights = (logits[:, place].double().softmax(-1) - q[:, place].double()).clamp(min=0)
    cumulative = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    expected = torch.searchsorted(cumulative, torch.from_numpy(draws)[:, None], right=True)[:, 0]
    assert output.num_accepted.tolist() == [place] * count
    assert output.token_ids[:, place].tolist() == expected.tolist()
    assert torch.equal(output.token_ids[:, :place], drafts[:, :place])


def test_greedy_rows_accept_the_longest_draft_that_plain_decoding_would_give() -> None:
    """Also among rows that sample, and where logits are equal: the lowest id is the greedy one."""
    torch.manual_seed(6)
    count, k, vocab_size = 300, 4, 6
    logits = torch.randn(count, k + 1, vocab_size).round()
    best = logits.argmax(-1)
    drafts = torch.where(torch.rand(count, k) < 0.75, best[:, :k], torch.randint(vocab_size, (count, k)))
    counts = torch.randint(k + 1, (count,))
    expected = []
    for row in range(count):
        tokens = []
        for column in range(k + 1):
            tokens.append(int(best[row, column]))
            if column >= counts[row] or drafts[row, column] != best[row, column]:
                break
        expected.append(tokens + [-1] * (k + 1 - len(tokens)))
    q = torch.randn(count, k, vocab_size).softmax(-1)
    alone = RejectionSampler()(logits, drafts, counts, q, None)
    mixed_rows = [{"temperature": (0.0, 1.0)[row % 2], "seed": row} for row in range(count)]
    for probs in (q, None):
        mixed = RejectionSampler()(logits, drafts, counts, probs, build(mixed_rows, k))
        assert mixed.token_ids[::2].tolist() == expected[::2]
        assert set(mixed.accept_probs[::2].unique().tolist()) == {0.0, 1.0}
        assert torch.allclose(mixed.target_probs[::2], alone.target_probs[::2], rtol=0, atol=1e-6)
    assert alone.token_ids.tolist() == expected
    assert [len([t for t in row if t >= 0]) - 1 for row in expected] == alone.num_accepted.tolist()


# Draws and inputs


def test_draws_are_those_of_position_and_purpose() -> None:
    rows = [{"temperature": 1.0, "seed": 2**63 - 1}, {"temperature": 0.0, "seed": 3}]
    sampling = build(rows, 2, [2**33, 4])
    for purpose, draws in (
        (Purpose.ACCEPT, sampling.accept_draws),
        (Purpose.RECOVERED, sampling.recovered_draws),
        (Purpose.TOKEN, sampling.token_draws),
    ):
        for row, (seed, position) in enumerate(((2**63 - 1, 2**33), (3, 4))):
            columns = draws.shape[1]
            expected = uniform([seed] * columns, [position + n for n in range(columns)], purpose)
            assert draws[row].tolist() == expected.tolist()
    assert len({purpose.value for purpose in Purpose}) == 4


def test_rows_that_are_greedy_and_free_need_no_tensors() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1e-6)]
    assert SpeculativeSampling.build(SamplingMetadata(params, [0, 0], [(), ()]), 2, CPU) is None
    sampling = build([{"min_tokens": 2}], 2, banned=[(1,)])
    assert (sampling.samples, sampling.filters) == (False, False)
    with pytest.raises(ValueError, match="num_speculative_tokens 0 is below 1"):
        SpeculativeSampling.build(SamplingMetadata(params, [0, 0], [(), ()]), 0, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_token_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"draft_token_ids has shape \(2, 3\); \(2, 2\)"),
        ({"num_draft_tokens": torch.zeros(1, dtype=torch.int64)}, "num_draft_tokens has shape"),
        ({"draft_probs": torch.zeros(2, 2, 4)}, "draft_probs has shape"),
        ({"target_logits": torch.zeros(2, 1, 5)}, "target_logits has 1 positions"),
        ({"sampling": build([{"temperature": 1.0}] * 2, 3)}, "accept_draws has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "target_logits": torch.zeros(2, 3, 5),
        "draft_token_ids": torch.zeros(2, 2, dtype=torch.int64),
        "num_draft_tokens": torch.zeros(2, dtype=torch.int64),
        "draft_probs": None,
        "sampling": None,
    }
    with pytest.raises(ValueError, match=message):
        RejectionSampler()(**(arguments | changes))


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("with_probs", [True, False])
def test_no_value_is_read_on_the_host(greedy: bool, with_probs: bool) -> None:
    """Fake tensors have shapes and no values: whatever asks for one raises. The row-by-row reference does.

    A small vocabulary goes the way of a GPU; the candidates of a large one are for the CPU alone.
    """
    sampling = build([{"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_tokens": 3}] * 4, 2, banned=[(1, 2)] * 4)
    with FakeTensorMode() as mode:
        fake: dict[str, Any] = {
            name: mode.from_tensor(value) if isinstance(value := getattr(sampling, name), Tensor) else value
            for name in SpeculativeSampling.__slots__
        }
        output = RejectionSampler()(
            torch.empty(4, 3, 10),
            torch.empty(4, 2, dtype=torch.int64),
            torch.empty(4, dtype=torch.int64),
            torch.empty(4, 2, 10) if with_probs else None,
            None if greedy else SpeculativeSampling(**fake),
        )
        assert (output.token_ids.shape, output.token_ids.dtype) == ((4, 3), torch.int64)
        assert (output.num_accepted.shape, output.finite.dtype) == ((4,), torch.bool)
        assert {x.dtype for x in (output.target_probs, output.draft_probs, output.accept_probs)} == {torch.float32}
        rows = (fake["temperature"], fake["top_k"], fake["top_p"], torch.empty(4, dtype=torch.float64))
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            sample_tokens(torch.empty(4, 10), *rows)


@pytest.mark.gpu
def test_in_a_cuda_graph_the_tokens_are_the_cpus() -> None:
    torch.manual_seed(10)
    count, k, vocab_size = 16, 4, 49_152
    logits = torch.randn(count, k + 1, vocab_size) * 3
    q = (logits[:, :k] + torch.randn(count, k, vocab_size)).softmax(-1)
    drafts = q.view(-1, vocab_size).multinomial(1).view(count, k)
    counts = torch.randint(k + 1, (count,))
    rows = [
        {"temperature": row % 3 / 2, "top_k": (-1, 50)[row % 2], "top_p": 0.95, "seed": row} for row in range(count)
    ]
    metadata = SamplingMetadata([SamplingParams(**row) for row in rows], [0] * count, [(5,)] * count)
    expected = RejectionSampler()(logits, drafts, counts, q, SpeculativeSampling.build(metadata, k, CPU))
    inputs = [tensor.cuda() for tensor in (logits, drafts, counts, q)]
    sampler, sampling = RejectionSampler(triton_ops()), SpeculativeSampling.build(metadata, k, torch.device("cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sampler(*inputs, sampling)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = sampler(*inputs, sampling)
    graph.replay()
    # A draw within 1e-6 of an edge may fall on either side.
    assert (output.token_ids.cpu() != expected.token_ids).any(dim=1).sum() <= 1
    assert output.finite.all()
    assert torch.allclose(output.accept_probs.cpu(), expected.accept_probs, rtol=0, atol=1e-4)
