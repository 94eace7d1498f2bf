from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.ops.verify_chain as module
from backend.sample.tree_rejection import TreeRejectionSampler
from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree
from backend.worker.round_download import num_round_bytes, pack_round
from backend.worker.tree_rounds import TreeRounds
from kernels.reference.sample_nodes import SampledNodes
from kernels.reference.verify_tree import TreeRound
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["verify_tree"]
IMPLEMENTATIONS = ["reference", "launch"]
TREES = {
    **DEFAULT_TREES,
    "lopsided": DraftTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]]),
    "one node": DraftTree((-1, 0)),
    "largest": DraftTree.from_paths([[rank] for rank in range(60)] + [[0, 0], [0, 0, 0], [0, 0, 0, 0]]),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)


def call(which: str, tree: DraftTree, logits: Tensor, drafts: Tensor, counts: Tensor) -> tuple[TreeRound, Tensor]:
    """And probs, float32 [3, num_rows, depth]."""
    parents = torch.tensor(tree.parents, device=logits.device)
    found: TreeRound = getattr(OP, which)(logits, drafts, counts, parents, tree.depth)
    num_rows = len(counts)
    assert found.packed.dtype == torch.uint8
    assert found.packed.shape == (num_round_bytes(num_rows, tree.depth),)
    assert (found.ids.shape, found.ids.data_ptr()) == ((num_rows, 2 * tree.depth + 3), found.packed.data_ptr())
    return found, found.packed[found.ids.nbytes :].view(torch.float32).view(3, num_rows, tree.depth)


def drafted(tree: DraftTree, num_rows: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded logits, so that most nodes have several that are largest; nodes that are often the likeliest; counts."""
    logits = torch.randn(num_rows, len(tree), vocab_size, device=device).mul(2).round()
    best = logits.max(dim=-1).indices
    others = torch.randint(vocab_size, (num_rows, tree.num_drafted), device=device)
    by_parent = best[:, torch.tensor(tree.parents[1:], device=device)]
    drafts = by_parent.where(torch.rand(others.shape, device=device) < 0.5, others)
    counts = torch.randint(len(tree), (num_rows,), device=device)
    counts[::2] = tree.num_drafted
    return logits.flatten(0, 1), drafts, counts


def naive(tree: DraftTree, logits: Tensor, drafts: Tensor, counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """`ids` and the accepted nodes, node by node, by Python's own comparisons. For finite logits."""
    all_ids, paths = [], []
    by_node = logits.view(len(counts), len(tree), -1).tolist()
    for scores, draft, count in zip(by_node, drafts.tolist(), counts.tolist(), strict=True):
        node, path, tokens, told = 0, [], [], []
        while True:
            tokens.append(scores[node].index(max(scores[node])))
            children = [child for child in tree.children[node] if child <= count]
            right = [child for child in children if draft[child - 1] == tokens[-1]]
            told += [draft[child - 1] for child in (right or children)[:1]]
            if not right:
                break
            node = right[0]
            path.append(node)
        padding = [-1] * (tree.depth - len(path))
        all_ids.append([*tokens, *padding, len(path), 1, *told, *[-1] * (tree.depth - len(told))])
        paths.append([*path, *padding])
    return all_ids, paths


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TREES)
def test_follows_what_is_likeliest(name: str, which: str, device: torch.device) -> None:
    torch.manual_seed(0)
    tree, bands = TREES[name], GuardBands(value=77)
    inputs = [bands.wrap(it) for it in drafted(tree, 6, 37, device)]
    before = [it.clone() for it in inputs]
    found, _ = call(which, tree, *inputs)
    expected_ids, expected_paths = naive(tree, *(it.cpu() for it in before))
    assert found.ids.tolist() == expected_ids
    assert found.accepted_nodes.tolist() == expected_paths
    assert found.last_nodes.tolist() == [max(0, *path) for path in expected_paths]
    assert found.next_token_ids.flatten().tolist() == before[0].max(dim=-1).indices.tolist()
    bands.assert_untouched()
    assert all(map(torch.equal, before, inputs))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_sampled_rows_follow_what_they_have_drawn(which: str, device: torch.device) -> None:
    """As a greedy walk does over logits whose largest are those tokens; beside greedy rows. Told are the given probabilities."""
    torch.manual_seed(6)
    tree, num_rows = TREES["lopsided"], 8
    logits, drafts, counts = drafted(tree, num_rows, 37, device)
    others, _, _ = drafted(tree, num_rows, 37, device)
    is_sampled = torch.arange(num_rows, device=device)[:, None] % 2 == 0
    token_ids = others.max(dim=-1).indices.view(num_rows, -1)
    behind = torch.tensor(tree.parents[1:], device=device)
    planted = token_ids[:, behind]  # some of the nodes hold what has been drawn behind their parents
    drafts = planted.where(is_sampled & (torch.rand(drafts.shape, device=device) < 0.7), drafts)
    probs = torch.rand(num_rows, tree.num_drafted, device=device)
    sampled = SampledNodes(token_ids.where(is_sampled, -1), probs)
    parents = torch.tensor(tree.parents, device=device)
    found: TreeRound = getattr(OP, which)(logits, drafts, counts, parents, tree.depth, sampled)
    walked = others.view(num_rows, -1).where(is_sampled, logits.view(num_rows, -1)).view(logits.shape)
    expected_ids, expected_paths = naive(tree, walked.cpu(), drafts.cpu(), counts.cpu())
    assert found.ids.tolist() == expected_ids
    assert found.accepted_nodes.tolist() == expected_paths
    assert found.next_token_ids.flatten().tolist() == walked.max(dim=-1).indices.tolist()
    told = found.packed[found.ids.nbytes :].view(torch.float32).view(3, num_rows, tree.depth)
    depths = [len(path) - path.count(-1) for path in expected_paths]
    assert max(depths[::2]) > 1
    for row in range(0, num_rows, 2):
        node = 0
        for level in range(tree.depth):
            child = expected_paths[row][level]
            refused = [it for it in tree.children[node] if it <= counts[row]] if level == depths[row] else []
            shown = child if child > 0 else (refused[0] if refused else 0)
            expected = probs[row, shown - 1].item() if shown else 0.0
            assert told[0, row, level].item() == told[1, row, level].item() == expected
            node = child if child > 0 else node


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter, where nothing has a probability
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TREES)
def test_agrees_with_the_rejection_sampler(name: str, which: str, device: torch.device) -> None:
    """Also on logits that are infinite or NaN wherever they stand, on siblings that hold the same, and on what means nothing."""
    torch.manual_seed(1)
    tree, num_rows = TREES[name], 10
    logits, drafts, counts = drafted(tree, num_rows, 33, device)
    drafts = drafts.where(torch.arange(tree.num_drafted, device=device) < counts[:, None], 2**40)
    damaged = torch.randperm(len(logits), device=device)[: len(logits) // 8].tolist()
    for place, value in zip(damaged, [math.nan, math.inf, -math.inf] * len(logits), strict=False):
        logits[place, torch.randint(33, (2,), device=device)] = value
    logits[0], logits[len(tree)] = -math.inf, math.nan
    by_node = logits.view(num_rows, len(tree), -1)
    verified = TreeRejectionSampler(tree, device)(by_node, drafts, counts, None, None)
    expected = pack_round(*TreeRounds(tree, device).as_chain(verified, drafts, counts))
    found, probs = call(which, tree, logits, drafts, counts)
    expected_ids = expected[: found.ids.nbytes].view(torch.int64).view(found.ids.shape)
    usable = verified.finite
    assert 0 < int(usable.sum()) < num_rows
    assert torch.equal(found.ids[usable], expected_ids[usable])
    # Of the others the path, the flag and the drafts; the token behind those that count is some id.
    assert torch.equal(found.ids[:, tree.depth + 1 :], expected_ids[:, tree.depth + 1 :])
    last = found.ids.gather(1, found.ids[:, tree.depth + 1, None])
    assert bool(((last >= 0) & (last < 33)).all())
    assert torch.equal(found.accepted_nodes, verified.accepted_nodes)
    assert torch.equal(found.last_nodes, verified.last_nodes)
    expected_probs = expected[found.ids.nbytes :].view(torch.float32).view(probs.shape)
    torch.testing.assert_close(probs[0], expected_probs[0], atol=0, rtol=1e-5)
    assert torch.equal(probs[1], expected_probs[1])
    assert torch.equal(probs[2], expected_probs[2])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_views_of_wider_tensors(which: str, device: torch.device) -> None:
    """As the logits of a vocabulary that is padded for the matrix product."""
    torch.manual_seed(2)
    tree = TREES["lopsided"]
    logits, drafts, counts = drafted(tree, 5, 20, device)
    wide = torch.full((len(logits), 30), math.nan, device=device)
    wide[:, :20] = logits
    wide_drafts = torch.full((5, 30), 2**40, device=device)
    wide_drafts[:, : tree.num_drafted] = drafts
    found, _ = call(which, tree, wide[:, :20], wide_drafts[:, : tree.num_drafted], counts)
    assert found.ids.tolist() == naive(tree, logits.cpu(), drafts.cpu(), counts.cpu())[0]


def test_kernels_write_nothing_but_their_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    tree = TREES["lopsided"]
    inputs = drafted(tree, 3, 70, device)
    bands = GuardBands(value=1)
    monkeypatch.setattr(torch, "empty", bands.empty)
    found, _ = call("launch", tree, *inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert found.ids.tolist() == naive(tree, *(it.cpu() for it in inputs))[0]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    found, _ = call(which, DraftTree((-1, 0, 0)), torch.zeros(0, 8, device=device), nothing.view(0, 2), nothing)
    assert found.ids.numel() == found.last_nodes.numel() == 0


@pytest.mark.gpu
def test_on_a_real_vocabulary(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2048)
    torch.manual_seed(4)
    tree = TREES["medusa"]
    logits, drafts, counts = drafted(tree, 16, 151_936, device)
    expected, probs = call("reference", tree, logits, drafts, counts)
    found, launched = call("launch", tree, logits, drafts, counts)
    for theirs, ours in zip(expected[1:], found[1:], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(launched, probs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(6, 8).half()}, "logits is float16; expected float32"),
        ({"logits": torch.zeros(5, 8)}, r"logits has shape \[5, 8\]; expected \[6, any\]"),
        ({"logits": torch.zeros(6, 0)}, "logits has 0 columns; at least 1 is expected"),
        ({"draft_token_ids": torch.zeros(2, 3).long()}, r"draft_token_ids has shape \[2, 3\]; expected \[2, 2\]"),
        ({"num_draft_tokens": torch.zeros(2).int()}, "num_draft_tokens is int32; expected int64"),
        ({"parents": torch.zeros(3).int()}, "parents is int32; expected int64"),
        ({"parents": torch.zeros(65).long()}, "parents has 65 entries; 2 to 64 are expected"),
        ({"depth": 3}, "depth is 3; a tree of 3 nodes is 1 to 2 deep"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "logits": torch.zeros(6, 8),
        "draft_token_ids": torch.zeros(2, 2).long(),
        "num_draft_tokens": torch.zeros(2).long(),
        "parents": torch.tensor([-1, 0, 0]),
        "depth": 1,
    }
    check: Callable[..., Any] = OP.launch
    with pytest.raises(ValueError, match=message):
        check(**(inputs | change))
