"""Rounds of a tree, put together as a worker does: draft, verify, let the head read what came of it, compact."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backend.attention.compaction import KVCompaction
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.sample.tree_rejection import TreeRejectionSampler
from backend.spec_decode.draft_tree import DEFAULT_TREES
from backend.spec_decode.tree_drafting import TreeLayout, eagle_nodes
from tests.spec_decode.tiny_heads import CPU, FEATURE_LAYERS, make_target, random_eagle, random_ids

BLOCK_SIZE, NUM_BLOCKS, PROMPT_LEN = 4, 24, 10
DEPTHS = (5, 0, 3, 2, 1, 4)  # of what is accepted in each round
TREE = DEFAULT_TREES["eagle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@torch.inference_mode()
def test_rounds_give_the_text_of_plain_decoding(folder: Path) -> None:
    """And drafts, after every round, are those of a head that has read the text from its beginning."""
    target = make_target(folder)
    head, model, config = random_eagle(target), target.model, target.config
    table = 1 + torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))[None].int()
    layers, (own, fresh) = (
        [
            LayerCache.zeros(NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32, CPU)
            for _ in range(n)
        ]
        for n in (config.num_layers, 2)
    )
    compact, sampler = KVCompaction([*layers, own], use_kernel=False), TreeRejectionSampler(TREE, CPU)
    layout, all_ids = TreeLayout.of(TREE, CPU), torch.arange(config.vocab_size)

    def metadata(start: int, depths: list[int]) -> AttentionMetadata:
        places = torch.arange(start, start + len(depths))
        slots = table[0, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
        starts, lens = torch.tensor([0, len(depths)]).int(), torch.tensor([start + len(depths)]).int()
        return AttentionMetadata(starts, lens, table, slots, start + torch.tensor(depths), 0)

    def read(token_ids: Tensor, features: Tensor, step: AttentionMetadata, cache: LayerCache = own) -> Tensor:
        embedded, cos_sin = F.embedding(token_ids, target.embedding), model.cos_sin_cache
        return head(embedded, features, step.positions, cos_sin, cache, step, ReferenceAttention())

    def likeliest_nodes(features: Tensor, num_tokens: int, cache: LayerCache) -> Tensor:
        passes = layout.passes(table, torch.tensor([num_tokens]), BLOCK_SIZE, config.max_position_embeddings - 1)
        return eagle_nodes(
            layout,
            features[None],
            passes,
            lambda ids, before, step: read(ids, before, step, cache),
            lambda behind: (head.final_norm(behind) @ target.embedding.t()).float(),
            all_ids,
        )

    def features_of(text: list[int]) -> Tensor:
        return head.fuse(target.run(torch.tensor([text]), FEATURE_LAYERS).features[0])

    def plain(text: list[int], count: int) -> list[int]:
        for _ in range(count):
            last = target.run(torch.tensor([text]), ()).last[0, -1]
            text = [*text, int(model.compute_logits(last[None]).argmax())]
        return text

    prompt = random_ids(config.vocab_size, 1, PROMPT_LEN)[0].tolist()
    expected = plain(prompt, sum(DEPTHS) + len(DEPTHS) + 1)
    text, draws = expected[: PROMPT_LEN + 1], random.Random(4)
    step = metadata(0, list(range(PROMPT_LEN)))
    model(torch.tensor(prompt), step.positions, layers, step, ReferenceAttention())
    behind = read(torch.tensor(text[1:]), features_of(prompt), step)[-1]
    for depth in DEPTHS:
        num_tokens = len(text)
        nodes = likeliest_nodes(behind, num_tokens, own)
        causal = metadata(0, list(range(num_tokens - 1)))
        again = read(torch.tensor(text[1:]), features_of(text[:-1]), causal, fresh)[-1]
        torch.testing.assert_close(behind, again, atol=1e-4, rtol=1e-4)
        assert torch.equal(nodes, likeliest_nodes(again, num_tokens, fresh))
        # A random head guesses nothing: on some path the target's own tokens stand for what it has guessed.
        end = draws.choice(TREE.levels[depth])
        path = [node for node in range(1, len(TREE)) if TREE.masks[end] >> node & 1]
        for node, token in zip(path, expected[num_tokens:], strict=False):
            nodes[0, node - 1] = token

        step = metadata(num_tokens - 1, list(TREE.depths))
        step = step.with_trees(torch.tensor(TREE.masks), torch.tensor([num_tokens - 1]).int())
        token_ids = torch.cat((torch.tensor(text[-1:]), nodes[0]))
        hidden = model(token_ids, step.positions, layers, step, ReferenceAttention())
        logits = model.compute_logits(hidden)
        verified = sampler(logits[None], nodes, torch.tensor([TREE.num_drafted]), None, None)
        accepted = int(verified.num_accepted[0])
        assert verified.accepted_nodes[0, :accepted].tolist() == path
        text += verified.token_ids[0, : accepted + 1].tolist()

        # What is behind each node of the path, and the target's features of it; of other nodes anything.
        following, states = torch.zeros(len(TREE), dtype=torch.int64), torch.randn(len(TREE), config.hidden_size)
        following[[0, *path]] = verified.token_ids[0, : accepted + 1]
        states[[0, *path]] = features_of(text[:-1])[num_tokens - 1 :]
        behind = read(following, states, step)[int(verified.last_nodes[0])]
        compact(step, torch.tensor([0]), verified.accepted_nodes)
    assert text == expected
