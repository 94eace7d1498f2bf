"""A decoder's step in which some requests verify trees of drafts, through both backends, against transformers on every path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.compaction import KVCompaction
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.spec_decode.draft_tree import DraftTree
from tests.helpers import dense_logits, make_tiny_model
from tests.interpreter import interpret_without_cuda

CPU, BLOCK_SIZE = torch.device("cpu"), 4
TREE = DraftTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 1], [0, 1, 0], [2, 1, 0]])
WINDOW = 6


def triton_attention(batch_invariant: bool) -> AttentionBackend:
    interpret_without_cuda()
    from backend.attention.triton import TritonAttention

    return TritonAttention(batch_invariant)


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "triton": lambda: triton_attention(False),
    "triton, batch-invariant": lambda: triton_attention(True),
}


@pytest.fixture(scope="module", params=[None, WINDOW], ids=["all", "window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    changes: dict[str, Any] = {"sliding_window": request.param} if request.param else {}
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), "Mistral" if request.param else "Llama", **changes)
    return folder, load_model(ModelSource(str(folder), "folder", path=folder), device=CPU, dtype=torch.float32)


class Batch:
    """Requests in blocks of one pool that lie in no order; the nodes of a tree lie behind their text's last token."""

    def __init__(self, loaded: LoadedModel, num_reqs: int, attention: AttentionBackend) -> None:
        config = loaded.config
        self.model, self.attention = loaded.model, attention
        order = torch.randperm(12 * num_reqs, generator=torch.Generator().manual_seed(0))
        self.block_table = 1 + order.view(num_reqs, 12).int()
        self.caches = [
            replace(
                LayerCache.zeros(12 * num_reqs, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32, CPU),
                window=it,
            )
            for it in config.windows
        ]

    def metadata(
        self, rows: list[int], starts: list[int], sizes: list[int], depths: list[list[int]]
    ) -> AttentionMetadata:
        """Each row's tokens take places from its start on; where they stand is depths beyond it."""
        places = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        tables = self.block_table[rows]
        slots = [
            table[place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
            for table, place in zip(tables, places, strict=True)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *sizes]).cumsum(0).int(),
            seq_lens=torch.tensor([start + size for start, size in zip(starts, sizes, strict=True)], dtype=torch.int32),
            block_table=tables,
            slot_mapping=torch.cat(slots),
            positions=torch.cat([start + torch.tensor(depth) for start, depth in zip(starts, depths, strict=True)]),
            num_decodes=sum(size == 1 for size in sizes),
        )

    def run(self, token_ids: list[int], metadata: AttentionMetadata) -> Tensor:
        hidden = self.model(torch.tensor(token_ids), metadata.positions, self.caches, metadata, self.attention)
        return self.model.compute_logits(hidden)

    def extend(self, row: int, token_ids: list[int], start: int) -> Tensor:
        size = len(token_ids)
        return self.run(token_ids, self.metadata([row], [start], [size], [list(range(size))]))


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_node_has_the_logits_of_its_path(tiny: tuple[Path, LoadedModel], backend: str) -> None:
    """A decode and a prompt's chunk beside two trees; then what is accepted is compacted, and the texts go on."""
    folder, loaded = tiny
    batch = Batch(loaded, 4, BACKENDS[backend]())
    texts = [ids(count, count) for count in (9, 14, 11, 5)]
    trees = {1: ids(len(TREE) - 1, 50), 3: ids(len(TREE) - 1, 51)}  # drafts for the second and the last
    known = [8, 13, 7, 4]
    for row, (text, count) in enumerate(zip(texts, known, strict=True)):
        batch.extend(row, text[:count], 0)
    nodes = len(TREE)
    metadata = batch.metadata(
        [0, 1, 2, 3], known, [1, nodes, 4, nodes], [[0], list(TREE.depths), list(range(4)), list(TREE.depths)]
    )
    masks = torch.tensor([-1, *TREE.masks, *[-1] * 4, *TREE.masks])
    metadata = metadata.with_trees(masks, torch.tensor(known, dtype=torch.int32))
    token_ids = [texts[0][-1], texts[1][-1], *trees[1], *texts[2][7:], texts[3][-1], *trees[3]]
    logits = batch.run(token_ids, metadata).split([1, nodes, 4, nodes])

    torch.testing.assert_close(logits[0], dense_logits(folder, texts[0])[-1:], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[2], dense_logits(folder, texts[2])[7:], atol=1e-4, rtol=0)
    paths: dict[int, list[list[int]]] = {}
    for row, drafts in trees.items():
        paths[row] = [texts[row]]
        for node in range(1, nodes):
            paths[row].append([*paths[row][TREE.parents[node]], drafts[node - 1]])
        for node, path in enumerate(paths[row]):
            torch.testing.assert_close(logits[row][node], dense_logits(folder, path)[-1], atol=1e-4, rtol=0)

    accepted = {1: [3, 7, 9], 3: [1, 5]}  # nodes
    compact = KVCompaction(batch.caches, use_kernel=backend != "reference")
    compact(metadata, torch.tensor([1, 1 + nodes + 4]), torch.tensor([accepted[1], [*accepted[3], -1]]))
    for row, path in accepted.items():
        text = [*paths[row][path[-1]], *ids(3, 60)]
        after = batch.extend(row, text[-3:], len(text) - 3)
        torch.testing.assert_close(after, dense_logits(folder, text)[-3:], atol=1e-4, rtol=0)
    text = [*texts[0], *ids(3, 61)]
    torch.testing.assert_close(batch.extend(0, text[-3:], 9), dense_logits(folder, text)[-3:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("use_kernel", [False, True])
def test_layers_of_every_group_move_in_their_own_slots(use_kernel: bool) -> None:
    if use_kernel:
        interpret_without_cuda()
    torch.manual_seed(0)
    caches = [replace(LayerCache.zeros(4, BLOCK_SIZE, 2, 8, torch.float32, CPU), group=group) for group in (0, 1, 0)]
    for cache in caches:
        cache.key_cache.normal_()
        cache.value_cache.normal_()
    before = [[tensor.flatten(0, 1).clone() for tensor in cache.tensors()] for cache in caches]
    slots = {0: torch.tensor([16, 4, 5, 6, 7, 12]), 1: torch.tensor([2, 9, 8, 17, 18, 3])}
    nothing = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(nothing, nothing, nothing[None], slots[0], slots[0], 0).with_groups(
        [nothing[None]], [slots[1]]
    )
    # Roots at tokens 1 and 0; of the first nodes 2 and 4 are accepted, of the second none.
    KVCompaction(caches, use_kernel=use_kernel)(
        metadata, torch.tensor([1, 0]), torch.tensor([[2, 4, -1], [-1, -1, -1]])
    )
    for cache, kept in zip(caches, before, strict=True):
        own = slots[cache.group].tolist()
        for tensor, held in zip(cache.tensors(), kept, strict=True):
            expected = held.clone()
            expected[own[2]], expected[own[3]] = held[own[3]], held[own[5]]
            assert torch.equal(tensor.flatten(0, 1), expected)
