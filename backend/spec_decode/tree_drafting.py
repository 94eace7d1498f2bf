"""Drafting along a static tree: a head's likeliest tokens at each node, as many as it has children."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.spec_decode.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """What drafting needs of a tree, on a device. Nothing that is computed with it asks for a value.

    An EAGLE head runs the inner nodes but the root, whose features it has, and no leaves: that is a tree without a root,
    in slots one behind the other.
    """

    tree: DraftTree
    parent_places: list[Tensor]  # of each level below the root: int64, of its nodes' parents among the inner ones above
    ranks: list[Tensor]  # of each level below the root: int64, of its nodes
    inner_places: list[Tensor]  # of each level below the root but the last: int64, of the inner nodes among all there
    inner_masks: list[Tensor]  # of the same: int64, bits of them and their ancestors but the root
    first_inner: list[int]  # of the same: inner nodes above it

    @staticmethod
    def of(tree: DraftTree, device: torch.device) -> TreeLayout:
        inner = [[node for node in level if tree.children[node]] for level in tree.levels]
        numbers = {node: number for number, node in enumerate(node for level in inner[1:] for node in level)}
        masks: dict[int, int] = {0: 0}
        for node, number in numbers.items():
            masks[node] = masks[tree.parents[node]] | 1 << number

        def tensors(rows: list[list[int]]) -> list[Tensor]:
            return [torch.tensor(row, dtype=torch.int64, device=device) for row in rows]

        levels = range(1, tree.depth + 1)
        return TreeLayout(
            tree=tree,
            parent_places=tensors([[inner[d - 1].index(tree.parents[n]) for n in tree.levels[d]] for d in levels]),
            ranks=tensors([[tree.ranks[n] for n in tree.levels[d]] for d in levels]),
            inner_places=tensors([[n - tree.levels[d].start for n in inner[d]] for d in levels[:-1]]),
            inner_masks=tensors([[masks[n] for n in inner[d]] for d in levels[:-1]]),
            first_inner=[numbers[inner[d][0]] for d in levels[:-1]],
        )

    def passes(
        self, block_table: Tensor, num_tokens: Tensor, block_size: int, max_position: int
    ) -> list[AttentionMetadata]:
        """The passes of an EAGLE head that `eagle_nodes` runs: a level of inner nodes each, in all rows.

        An entry stands one position before its token, see `EagleHead`. Places without a block get the null block's slots.

        Args:
            block_table: int32 [num_rows, max_num_blocks]; of a padding row all null.
            num_tokens: int64 [num_rows], that the requests have, the root included, at least 1.
            max_position: what positions are cut to, where a tree reaches past the end of the context.
        """
        num_rows, device = len(num_tokens), num_tokens.device
        starts, passes = num_tokens - 1, []
        for depth, (mask, first) in enumerate(zip(self.inner_masks, self.first_inner, strict=True)):
            width = len(mask)
            places = starts[:, None] + first + torch.arange(width, device=device)
            index = places // block_size
            block = block_table.gather(1, index.clamp(max=block_table.shape[1] - 1)).long()
            slots = (block * block_size + places % block_size).where((index < block_table.shape[1]) & (block > 0), 0)
            passes.append(
                AttentionMetadata(
                    query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * width,
                    seq_lens=(starts + first + width).int(),
                    block_table=block_table,
                    slot_mapping=slots.flatten(),
                    positions=(starts + depth)
                    .clamp(max=max_position)
                    .repeat_interleave(width, output_size=num_rows * width),
                    num_decodes=0,
                ).with_trees(mask.repeat(num_rows), starts.int())
            )
        return passes


def medusa_nodes(layout: TreeLayout, logits: Tensor, token_ids: Tensor) -> Tensor:
    """A node's token is the head's of its depth, the same below every parent.

    Args:
        logits: float32 [num_rows, num_heads, draft_vocab], at least as many heads as the tree is deep.
        token_ids: int64 [draft_vocab], of the target's vocabulary.
    Returns:
        int64 [num_rows, num_drafted], of the nodes from 1 on.
    Raises:
        ValueError: the tree is deeper, or a node has more children than can be drafted.
    """
    num_heads = logits.shape[1]
    if layout.tree.depth > num_heads:
        raise ValueError(
            f"the draft tree is {layout.tree.depth} levels deep, and there are {num_heads} Medusa heads: cut it to those"
        )
    levels = []
    for depth, ranks in enumerate(layout.ranks):
        levels.append(_likeliest(logits[:, depth], layout, depth)[:, ranks])
    return token_ids[torch.cat(levels, dim=1)]


def eagle_nodes(
    layout: TreeLayout,
    features: Tensor,
    passes: Sequence[AttentionMetadata],
    run: Callable[[Tensor, Tensor, AttentionMetadata], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    token_ids: Tensor,
) -> Tensor:
    """Level by level: the inner nodes of each run through the head, each beside the features of its parent's.

    Args:
        features: float [num_rows, hidden], behind the last token of each text.
        passes: of `TreeLayout.passes`.
        run: tokens int64 [num_entries] and the features before them, float [num_entries, hidden], to the features behind them.
        logits_of: features to float32 [num_entries, draft_vocab].
        token_ids: int64 [draft_vocab], of the target's vocabulary.
    Returns:
        int64 [num_rows, num_drafted], of the nodes from 1 on.
    Raises:
        ValueError: a node has more children than can be drafted.
    """
    num_rows, features = len(features), features[:, None]
    levels: list[Tensor] = []
    for depth, (parents, ranks) in enumerate(zip(layout.parent_places, layout.ranks, strict=True)):
        logits = logits_of(features.flatten(0, 1)).view(num_rows, features.shape[1], -1)
        levels.append(token_ids[_likeliest(logits, layout, depth)[:, parents, ranks]])
        if depth < len(passes):
            inner = layout.inner_places[depth]
            behind = run(levels[-1][:, inner].flatten(), features[:, parents[inner]].flatten(0, 1), passes[depth])
            features = behind.view(num_rows, len(inner), -1)
    return torch.cat(levels, dim=1)


def _likeliest(logits: Tensor, layout: TreeLayout, depth: int) -> Tensor:
    """int64 [..., width], places in the draft vocabulary by falling logit, as many as a node of that depth has children."""
    tree = layout.tree
    width = max(len(tree.children[node]) for node in tree.levels[depth])
    if width > logits.shape[-1]:
        raise ValueError(f"a node of the draft tree has {width} children, and {logits.shape[-1]} tokens can be drafted")
    return logits.topk(width).indices
