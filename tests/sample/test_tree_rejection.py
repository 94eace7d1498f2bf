from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from backend.sample.metadata import SamplingMetadata
from backend.sample.rejection_sampler import RejectionSampler
from backend.sample.sampler import Sampler, triton_ops
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sample.tree_rejection import TreeRejectionSampler, VerifiedTree
from backend.sampling_params import SamplingParams
from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree
from tests.interpreter import interpret_without_cuda
from tests.sample.rounds import CPU, build

TREE = DraftTree.from_paths(
    [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]]
)  # nodes 1 2 3, 4 5 below 1, 6 below 3, 7 below 5


def chain(k: int) -> DraftTree:
    return DraftTree(tuple(range(-1, k)))


def verify(
    tree: DraftTree,
    logits: Tensor,
    tokens: Tensor,
    sampling: SpeculativeSampling | None,
    draft_probs: Tensor | None = None,
    num_draft_tokens: list[int] | None = None,
) -> VerifiedTree:
    counts = torch.tensor(num_draft_tokens or [tree.num_drafted] * len(tokens))
    return TreeRejectionSampler(tree, CPU)(logits, tokens, counts, draft_probs, sampling)


def greedy_walk(tree: DraftTree, logits: Tensor, tokens: list[int], num_drafted: int) -> tuple[list[int], list[int]]:
    """Nodes accepted and tokens of one row, by the definition of greedy decoding."""
    node, nodes, out = 0, [], []
    while True:
        choice = int(logits[node].argmax())
        out.append(choice)
        following = [child for child in tree.children[node] if child <= num_drafted and tokens[child - 1] == choice]
        if not following:
            return nodes, out
        node = following[0]
        nodes.append(node)


@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_rows_walk_along_the_largest_logits(mixed: bool) -> None:
    """Also beside a row that is sampled, and where a draft distribution would have it otherwise."""
    torch.manual_seed(0)
    tree, vocab_size, num_rows = DEFAULT_TREES["eagle"], 6, 500
    logits = torch.randn(num_rows, len(tree), vocab_size)
    choices = (logits + 0.5 * torch.randn(logits.shape)).topk(5).indices
    ranked = zip(tree.parents[1:], tree.ranks[1:], strict=True)
    drafted = torch.stack([choices[:, parent, rank] for parent, rank in ranked], dim=1)
    counts = [tree.levels[1 + row % tree.depth].stop - 1 for row in range(num_rows)]
    counts[0] = 0
    sampling, draft_probs = None, None
    if mixed:
        rows: list[dict[str, Any]] = [{"temperature": 0.0}] * num_rows
        rows[7] = {"temperature": 1.0}
        sampling = build(rows, tree.depth)
        draft_probs = torch.randn(num_rows, TreeRejectionSampler(tree, CPU).num_inner, vocab_size).softmax(-1)
    output = verify(tree, logits, drafted, sampling, draft_probs, counts)
    lengths = set()
    for row in range(num_rows):
        if mixed and row == 7:
            continue
        nodes, ids = greedy_walk(tree, logits[row], drafted[row].tolist(), counts[row])
        lengths.add(len(nodes))
        assert output.token_ids[row].tolist() == ids + [-1] * (tree.depth + 1 - len(ids))
        assert output.accepted_nodes[row].tolist() == nodes + [-1] * (tree.depth - len(nodes))
        assert (output.num_accepted[row], output.last_nodes[row]) == (len(nodes), [0, *nodes][-1])
    assert lengths == set(range(6))
    assert output.finite.all()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "row", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_tokens": 3}, {"temperature": 0.0}]
)
def test_a_chain_gives_what_the_rejection_sampler_does(row: dict[str, Any], given: bool) -> None:
    torch.manual_seed(1)
    num_rows, k, vocab_size = 1500, 4, 8
    logits, counts = torch.randn(num_rows, k + 1, vocab_size), [n % (k + 1) for n in range(num_rows)]
    probs = (logits[:, :k] + 0.7 * torch.randn(num_rows, k, vocab_size)).softmax(-1)
    tokens = probs.flatten(0, 1).multinomial(1).view(num_rows, k)
    rows = [row | {"seed": seed} for seed in range(num_rows)]
    banned = [(2,) if row.get("min_tokens") else ()] * num_rows
    sampling = build(rows, k, [1] * num_rows, banned) if row["temperature"] else None
    draft_probs = probs if given else None
    expected = RejectionSampler()(logits, tokens, torch.tensor(counts), draft_probs, sampling)
    output = verify(chain(k), logits, tokens, sampling, draft_probs, counts)
    assert torch.equal(output.token_ids, expected.token_ids)
    assert torch.equal(output.num_accepted, expected.num_accepted)
    assert expected.num_accepted.unique().tolist() == list(range(k + 1))
    was_tried = torch.arange(k) <= torch.minimum(expected.num_accepted, torch.tensor(counts) - 1)[:, None]
    for name in ("target_probs", "draft_probs", "accept_probs"):
        torch.testing.assert_close(
            getattr(output, name), getattr(expected, name).where(was_tried, 0), atol=1e-6, rtol=1e-6
        )


def test_a_row_that_drafts_nothing_gets_the_plain_token() -> None:
    torch.manual_seed(2)
    params = [SamplingParams(temperature=0.5 * (n % 3), top_k=5 * (n % 2), seed=n) for n in range(60)]
    metadata = SamplingMetadata(params, list(range(60)), [()] * 60)
    logits = torch.randn(60, len(TREE), 20)
    sampling = SpeculativeSampling.build(metadata, TREE.depth, CPU)
    output = verify(TREE, logits, torch.zeros(60, TREE.num_drafted, dtype=torch.int64), sampling, None, [0] * 60)
    assert torch.equal(output.token_ids[:, 0], Sampler()(logits[:, 0].clone(), metadata).token_ids)
    assert (output.token_ids[:, 1:] == -1).all()
    assert not output.last_nodes.any()


def test_the_token_behind_a_leaf_is_the_plain_one_of_its_position() -> None:
    torch.manual_seed(3)
    params = [SamplingParams(temperature=1.0, seed=n) for n in range(200)]
    logits = torch.randn(200, len(TREE), 4)
    tokens = torch.stack([torch.randperm(4) for _ in range(200)])[:, [0, 1, 2, 0, 1, 3, 2]]
    sampling = SpeculativeSampling.build(SamplingMetadata(params, [5] * 200, [()] * 200), TREE.depth, CPU)
    output = verify(TREE, logits, tokens, sampling)
    leaves = [node for node in range(len(TREE)) if not TREE.children[node]]
    rows = [row for row in range(200) if int(output.last_nodes[row]) in leaves]
    assert {int(output.last_nodes[row]) for row in rows} == set(leaves)
    for row in rows:
        length, node = int(output.num_accepted[row]), int(output.last_nodes[row])
        plain = Sampler()(logits[row, node][None].clone(), SamplingMetadata([params[row]], [5 + length], [()]))
        assert output.token_ids[row, length] == plain.token_ids[0]


def test_a_row_depends_on_nothing_but_itself() -> None:
    torch.manual_seed(4)
    rows = [{"temperature": 0.4 * (n % 4), "top_p": 1 - 0.1 * (n % 3), "seed": n} for n in range(12)]
    logits, tokens = torch.randn(12, len(TREE), 5), torch.randint(5, (12, TREE.num_drafted))
    sampling = build(rows, TREE.depth)
    together = verify(TREE, logits, tokens, sampling)
    for row in range(12):
        one = build([rows[row]], TREE.depth) if rows[row]["temperature"] else None
        alone = verify(TREE, logits[row : row + 1], tokens[row : row + 1], one)
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
        assert torch.equal(alone.accepted_nodes[0], together.accepted_nodes[row])


def test_what_lies_where_no_node_is_has_no_part_in_it() -> None:
    """Logits and distributions of nodes that are not there, or not reached, may be anything."""
    torch.manual_seed(5)
    rows = [{"temperature": 1.0, "seed": n} for n in range(40)]
    logits, tokens = torch.randn(40, len(TREE), 4), torch.randint(4, (40, TREE.num_drafted))
    probs = torch.rand(40, TreeRejectionSampler(TREE, CPU).num_inner, 4)
    sampling, count = build(rows, TREE.depth), [3] * 40
    expected = verify(TREE, logits, tokens, sampling, probs, count)
    logits[:, 4:], tokens[:, 3:] = torch.nan, -7
    probs[:, 1:] = torch.nan
    output = verify(TREE, logits, tokens, sampling, probs, count)
    assert torch.equal(output.token_ids, expected.token_ids)
    assert output.finite.all()
    assert (output.num_accepted > 0).any()


def test_a_row_without_usable_logits_where_it_stands_says_so() -> None:
    logits, tokens = torch.randn(3, len(TREE), 4), torch.zeros(3, TREE.num_drafted, dtype=torch.int64)
    logits[:, 0, 0] = 9.0  # node 1 is accepted
    logits[0, 0] = torch.nan
    logits[1, 1] = torch.nan
    logits[2, 2] = torch.nan
    for sampling in (
        None,
        replace(build([{"temperature": 1.0}] * 3, TREE.depth), accept_draws=torch.zeros(3, 3).double()),
    ):
        assert verify(TREE, logits, tokens, sampling).finite.tolist() == [False, False, True]


def test_a_draft_that_had_fewer_tokens_than_children_has_drawn_no_more() -> None:
    """Of one token all children hold it: the second is none, and what is refused once stays refused."""
    logits = torch.tensor([0.6, 0.4]).log().expand(1, len(TREE), 2)
    probs = torch.tensor([1.0, 0.0]).expand(1, TreeRejectionSampler(TREE, CPU).num_inner, 2)
    sampling = replace(build([{"temperature": 1.0}], TREE.depth), accept_draws=torch.full((1, 3), 0.61).double())
    for given in (probs, None):
        output = verify(TREE, logits, torch.zeros(1, TREE.num_drafted, dtype=torch.int64), sampling, given)
        assert output.token_ids[0].tolist() == [1, -1, -1, -1]
        assert output.accept_probs[0, :3].tolist() == pytest.approx([0.6, 0, 0])


def test_the_kernels_give_the_tokens_of_the_reference() -> None:
    interpret_without_cuda()
    torch.manual_seed(6)
    rows = [{"temperature": 0.5 * (n % 3), "top_k": 3 * (n % 2), "seed": n} for n in range(24)]
    logits, tokens = torch.randn(24, len(TREE), 6), torch.randint(6, (24, TREE.num_drafted))
    for sampling in (None, build(rows, TREE.depth)):
        counts = torch.full((24,), TREE.num_drafted)
        by_kernel = TreeRejectionSampler(TREE, CPU, triton_ops())(logits, tokens, counts, None, sampling)
        assert torch.equal(by_kernel.token_ids, verify(TREE, logits, tokens, sampling).token_ids)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("with_probs", [True, False])
def test_no_value_is_read_on_the_host(greedy: bool, with_probs: bool) -> None:
    """Fake tensors have shapes and no values: whatever asks for one raises."""
    sampling = build([{"temperature": 1.0, "top_k": 3, "min_tokens": 3}] * 4, TREE.depth, banned=[(1, 2)] * 4)
    with FakeTensorMode() as mode:
        fake: dict[str, Any] = {
            name: mode.from_tensor(value) if isinstance(value := getattr(sampling, name), Tensor) else value
            for name in SpeculativeSampling.__slots__
        }
        sampler = TreeRejectionSampler(TREE, CPU)
        output = sampler(
            torch.empty(4, len(TREE), 10),
            torch.empty(4, TREE.num_drafted, dtype=torch.int64),
            torch.empty(4, dtype=torch.int64),
            torch.empty(4, sampler.num_inner, 10) if with_probs else None,
            None if greedy else SpeculativeSampling(**fake),
        )
    assert (output.token_ids.shape, output.token_ids.dtype) == ((4, TREE.depth + 1), torch.int64)
    assert (output.accepted_nodes.shape, output.accepted_nodes.dtype) == ((4, TREE.depth), torch.int64)
    assert (output.last_nodes.shape, output.finite.dtype) == ((4,), torch.bool)
    for probs in (output.target_probs, output.draft_probs, output.accept_probs):
        assert (probs.shape, probs.dtype) == ((4, TREE.num_drafted), torch.float32)


@pytest.mark.gpu
def test_in_a_cuda_graph_the_tokens_are_the_cpus() -> None:
    torch.manual_seed(10)
    tree, device, count, vocab_size = DEFAULT_TREES["eagle"], torch.device("cuda"), 8, 5_000
    logits = torch.randn(count, len(tree), vocab_size) * 3
    ranked = zip(tree.parents[1:], tree.ranks[1:], strict=True)
    drafts = torch.stack([logits[:, parent].topk(5).indices[:, rank] for parent, rank in ranked], dim=1)
    rows = [
        {"temperature": row % 3 / 2, "top_k": (-1, 50)[row % 2], "top_p": 0.95, "seed": row} for row in range(count)
    ]
    sampling = build(rows, tree.depth)
    expected = verify(tree, logits, drafts, sampling)
    remote: dict[str, Any] = {
        name: value.to(device) if isinstance(value := getattr(sampling, name), Tensor) else value
        for name in SpeculativeSampling.__slots__
    }
    sampler = TreeRejectionSampler(tree, device, triton_ops())
    counts = torch.full((count,), tree.num_drafted, device=device)
    inputs = (logits.to(device), drafts.to(device), counts, None, SpeculativeSampling(**remote))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sampler(*inputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = sampler(*inputs)
    graph.replay()
    # A draw within 1e-6 of an edge may fall on either side.
    assert (output.token_ids.cpu() != expected.token_ids).any(dim=1).sum() <= 1
    assert output.finite.all()
    assert (expected.num_accepted > 0).any()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"logits": torch.zeros(1, 7, 4)}, r"target_logits has shape \(1, 7, 4\); \(1, 8, 4\) belongs to 1 rows"),
        ({"tokens": torch.zeros(1, 8, dtype=torch.int64)}, r"draft_token_ids has shape \(1, 8\)"),
        ({"draft_probs": torch.zeros(1, 8, 4)}, r"draft_probs has shape \(1, 8, 4\); \(1, 4, 4\)"),
        ({"sampling": build([{"temperature": 1.0}], 2)}, r"accept_draws has shape \(1, 2\); \(1, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], problem: str) -> None:
    fitting = {"logits": torch.zeros(1, 8, 4), "tokens": torch.zeros(1, 7, dtype=torch.int64), "sampling": None}
    with pytest.raises(ValueError, match=problem):
        verify(TREE, **(fitting | change))
