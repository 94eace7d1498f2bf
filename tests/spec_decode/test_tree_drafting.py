from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree
from backend.spec_decode.heads.target import DenseTarget
from backend.spec_decode.tree_drafting import TreeLayout, eagle_nodes, medusa_nodes
from tests.spec_decode.tiny_heads import CPU, FEATURE_LAYERS, make_target, random_eagle, random_ids

BLOCK_SIZE = 4
TREES = {
    **DEFAULT_TREES,
    "chain": DraftTree((-1, 0, 1, 2)),
    "level": DraftTree.from_paths([[0], [1], [2]]),
    "lopsided": DraftTree.from_paths([[0], [1], [2], [1, 0], [1, 1], [2, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0, 0]]),
}
DRAFT_IDS = torch.arange(7, 512, 5)  # what can be drafted


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DenseTarget:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", TREES)
def test_medusa_nodes_are_the_likeliest_of_each_head(name: str) -> None:
    tree, logits = TREES[name], torch.randn(3, 5, len(DRAFT_IDS), generator=torch.Generator().manual_seed(0))
    nodes = medusa_nodes(TreeLayout.of(tree, CPU), logits, DRAFT_IDS)
    assert nodes.shape == (3, tree.num_drafted)
    for row in range(3):
        for token, path in zip(nodes[row].tolist(), tree.paths, strict=True):
            by_rank = sorted(range(len(DRAFT_IDS)), key=lambda i: -float(logits[row, len(path) - 1, i]))
            assert token == DRAFT_IDS[by_rank[path[-1]]]


def test_a_tree_deeper_than_there_are_heads_is_refused() -> None:
    layout = TreeLayout.of(TREES["chain"], CPU)
    with pytest.raises(ValueError, match="3 levels deep, and there are 2 Medusa heads"):
        medusa_nodes(layout, torch.zeros(1, 2, 4), torch.arange(4))
    with pytest.raises(ValueError, match="a node of the draft tree has 3 children, and 2 tokens can be drafted"):
        medusa_nodes(TreeLayout.of(TREES["level"], CPU), torch.zeros(1, 2, 2), torch.arange(2))


class Eagle:
    """A random head over a paged cache, whose entries of known tokens are there."""

    def __init__(self, target: DenseTarget, lengths: list[int], window: int | None) -> None:
        self.target, self.head, self.lengths, config = target, random_eagle(target), lengths, target.config
        blocks = 12
        self.cache = replace(
            LayerCache.zeros(
                blocks * len(lengths), BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32, CPU
            ),
            window=window,
        )
        order = torch.randperm(blocks * len(lengths), generator=torch.Generator().manual_seed(0))
        self.block_table = 1 + order.view(len(lengths), blocks).int()
        self.texts = [random_ids(512, 1, length, seed=length)[0] for length in lengths]
        self.known = []  # features of every token but the last
        for row, text in enumerate(self.texts):
            states = target.run(text[None], FEATURE_LAYERS)
            self.known.append(self.head.fuse(states.features[0, :-1]))
            self.run(text[1:], self.known[-1], self.causal(row, 0, len(text) - 1))

    def causal(self, row: int, begin: int, end: int) -> AttentionMetadata:
        positions, table = torch.arange(begin, end), self.block_table[row]
        slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts, lens = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        return AttentionMetadata(starts, lens, table[None], slots, positions, 0)

    def run(self, token_ids: Tensor, features: Tensor, metadata: AttentionMetadata) -> Tensor:
        embedded, cos_sin = F.embedding(token_ids, self.target.embedding), self.target.model.cos_sin_cache
        return self.head(embedded, features, metadata.positions, cos_sin, self.cache, metadata, ReferenceAttention())

    def logits(self, features: Tensor) -> Tensor:
        return (self.head.final_norm(features) @ self.target.embedding[DRAFT_IDS].t()).float()

    def behind(self, row: int, drafts: list[int]) -> Tensor:
        """Features behind a text and a chain of drafts, all of its entries run one by one from the start: [hidden]."""
        tokens, features = torch.cat((self.texts[row], torch.tensor(drafts, dtype=torch.int64))), self.known[row]
        known = len(features)
        hidden = self.run(tokens[1 : known + 1], features, self.causal(row, 0, known))[-1:]
        for index in range(len(drafts)):
            hidden = self.run(
                tokens[known + 1 + index][None], hidden, self.causal(row, known + index, known + index + 1)
            )
        return hidden[0]


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("name", TREES)
@torch.inference_mode()
def test_eagle_nodes_are_the_likeliest_behind_their_own_path(
    target: DenseTarget, name: str, window: int | None
) -> None:
    """Each node's parent is reached by a chain of its own, which knows of no tree."""
    tree, eagle = TREES[name], Eagle(target, [6, 17], window)
    layout = TreeLayout.of(tree, CPU)
    num_tokens = torch.tensor([*eagle.lengths, 1])
    table = torch.cat((eagle.block_table, torch.zeros_like(eagle.block_table[:1])))  # the last row is padding
    passes = layout.passes(table, num_tokens, BLOCK_SIZE, target.config.max_position_embeddings - 1)
    assert len(passes) == tree.depth - 1
    features = torch.stack([*(eagle.behind(row, []) for row in range(2)), torch.zeros(target.config.hidden_size)])
    nodes = eagle_nodes(layout, features, passes, eagle.run, eagle.logits, DRAFT_IDS)
    assert nodes.shape == (3, tree.num_drafted)
    for row in range(2):
        by_path = dict(zip(map(tuple, tree.paths), nodes[row].tolist(), strict=True))
        for path, token in by_path.items():
            drafts = [by_path[path[:n]] for n in range(1, len(path))]
            ranked = eagle.logits(eagle.behind(row, drafts)).sort(descending=True)
            assert token == DRAFT_IDS[ranked.indices[path[-1]]], (path, ranked.values[:8])


def test_places_without_a_block_are_the_null_blocks() -> None:
    """A text that ends with its last block; one that is padding. Positions do not pass the end of the context."""
    layout = TreeLayout.of(TREES["lopsided"], CPU)
    table = torch.tensor([[3, 1, 2], [5, 0, 0], [7, 8, 0]], dtype=torch.int32)  # the last row's are another's by now
    first, second, third = layout.passes(table, torch.tensor([11, 3, 0]), BLOCK_SIZE, max_position=11)
    assert first.slot_mapping.tolist() == [2 * 4 + 2, 2 * 4 + 3, 5 * 4 + 2, 5 * 4 + 3, 0, 0]
    assert second.slot_mapping.tolist() == [0, 0, 0]
    assert first.positions.tolist() == [10, 10, 2, 2, 0, 0]
    assert third.positions.tolist() == [11, 4, 2]
    assert third.seq_lens.tolist() == [14, 6, 4]
    assert second.tree_mask is not None
    assert second.tree_mask.tolist() == [0b101, 0b101, 0b101]  # below the first inner node, which is path [1]
    assert second.tree_starts is not None
    assert second.tree_starts.tolist() == [10, 2, 0]


def test_no_value_is_read_on_the_host() -> None:
    """Fake tensors have shapes and no values: whatever asks for one raises."""
    tree = TREES["eagle"]
    with FakeTensorMode():
        layout = TreeLayout.of(tree, CPU)
        table, num_tokens = torch.empty(3, 9, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
        passes = layout.passes(table, num_tokens, BLOCK_SIZE, 99)
        projection, token_ids = torch.empty(8, 20), torch.empty(20, dtype=torch.int64)
        nodes = eagle_nodes(
            layout,
            torch.empty(3, 8),
            passes,
            lambda ids, x, step: x + ids[:, None] + step.positions[:, None],
            lambda x: x @ projection,
            token_ids,
        )
        heads = medusa_nodes(layout, torch.empty(3, tree.depth, 20), token_ids)
    assert nodes.shape == heads.shape == (3, tree.num_drafted)
    assert nodes.dtype == heads.dtype == torch.int64
