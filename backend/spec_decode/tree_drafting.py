"""Drafting along a static tree: a head's likeliest tokens at each node, as many as it has children."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata
from backend.spec_decode.draft_tree import DraftTree
from kernels.reference.top_tokens import top_tokens

TopTokens = Callable[[Tensor, int, Tensor], Tensor]  # an implementation of `top_tokens`


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """What drafting needs of a tree, on a device. Nothing that is computed with it asks for a value.

    An EAGLE head runs the inner nodes but the root, whose features it has, and no leaves: that is a tree without a root,
    in slots one behind the other.
    """

    tree: DraftTree
    depths: Tensor  # int64 [num_drafted], of the nodes but the root, from 0 on
    all_ranks: Tensor  # int64 [num_drafted], of the same
    parent_places: list[Tensor]  # of each level below the root: int64, of its nodes' parents among the inner ones above
    ranks: list[Tensor]  # of each level below the root: int64, of its nodes
    inner_places: list[Tensor]  # of each level below the root but the last: int64, of the inner nodes among all there
    inner_parents: list[Tensor]  # of the same: int64, of those nodes' parents among the inner ones above
    inner_masks: list[Tensor]  # of the same: int64, bits of them and their ancestors but the root
    first_inner: list[int]  # of the same: inner nodes above it
    _entries: dict[int, _Entries] = field(default_factory=dict)  # by rows; kept, for graphs read them at each replay

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
            depths=torch.tensor(tree.depths[1:], device=device) - 1,
            all_ranks=torch.tensor(tree.ranks[1:], device=device),
            parent_places=tensors([[inner[d - 1].index(tree.parents[n]) for n in tree.levels[d]] for d in levels]),
            ranks=tensors([[tree.ranks[n] for n in tree.levels[d]] for d in levels]),
            inner_places=tensors([[n - tree.levels[d].start for n in inner[d]] for d in levels[:-1]]),
            inner_parents=tensors([[inner[d - 1].index(tree.parents[n]) for n in inner[d]] for d in levels[:-1]]),
            inner_masks=tensors([[masks[n] for n in inner[d]] for d in levels[:-1]]),
            first_inner=[numbers[inner[d][0]] for d in levels[:-1]],
        )

    def passes(
        self, block_table: Tensor, num_tokens: Tensor, block_size: int, max_position: int
    ) -> list[AttentionMetadata]:
        """The passes of an EAGLE head that `eagle_nodes` runs: a level of inner nodes each, in all rows.

        An entry stands one position before its token, see `EagleHead`. Places without a block get the null block's slots.

        Args:
            block_table: int32 [num_rows, max_num_blocks].
            num_tokens: int64 [num_rows], that the requests have, the root included; 0 of a padding row.
            max_position: what positions are cut to, where a tree reaches past the end of the context.
        """
        if not self.inner_masks:
            return []
        num_rows, device = len(num_tokens), num_tokens.device
        if num_rows not in self._entries:
            self._entries[num_rows] = self._make_entries(num_rows, device)
        entries = self._entries[num_rows]
        starts = (num_tokens - 1).clamp(min=0)
        begins = starts.index_select(0, entries.rows)
        positions = (begins + entries.depths).clamp(max=max_position)
        places = begins + entries.numbers
        index = places // block_size
        columns = index.clamp(max=block_table.shape[1] - 1)
        block = block_table.view(-1).index_select(0, entries.rows * block_table.shape[1] + columns).long()
        has_slot = (index < block_table.shape[1]) & (block > 0) & (num_tokens > 0).index_select(0, entries.rows)
        slots = (block * block_size + places % block_size) * has_slot
        seq_lens, tree_starts = (starts + entries.ends).int(), starts.int()
        passes, begin = [], 0
        for depth, mask in enumerate(self.inner_masks):
            end = begin + num_rows * len(mask)
            metadata = AttentionMetadata(
                query_start_loc=entries.query_start_locs[depth],
                seq_lens=seq_lens[depth],
                block_table=block_table,
                slot_mapping=slots[begin:end],
                positions=positions[begin:end],
                num_decodes=0,
                longest_chunk=len(mask),
            )
            passes.append(metadata.with_trees(entries.masks[begin:end], tree_starts))
            begin = end
        return passes

    def _make_entries(self, num_rows: int, device: torch.device) -> _Entries:
        rows = torch.arange(num_rows, device=device)
        parts = []
        for depth, (mask, first) in enumerate(zip(self.inner_masks, self.first_inner, strict=True)):
            width = len(mask)
            numbers = torch.arange(first, first + width, device=device)
            each = (
                rows.repeat_interleave(width),
                numbers.repeat(num_rows),
                torch.full_like(mask, depth).repeat(num_rows),
            )
            parts.append((*each, mask.repeat(num_rows)))
        entry_rows, numbers, depths, masks = (torch.cat(column) for column in zip(*parts, strict=True))
        widths = [len(mask) for mask in self.inner_masks]
        counting = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        ends = [torch.full_like(rows, first + width) for first, width in zip(self.first_inner, widths, strict=True)]
        return _Entries(entry_rows, numbers, depths, masks, torch.stack(ends), [counting * width for width in widths])


@dataclass(frozen=True, slots=True)
class _Entries:
    """All entries of all passes over so many rows, level by level and row by row: of each, int64 [num_entries]."""

    rows: Tensor
    numbers: Tensor  # of its node among the inner ones
    depths: Tensor  # below those of the first level
    masks: Tensor
    ends: Tensor  # int64 [num_passes, num_rows], inner nodes down to each level
    query_start_locs: list[Tensor]  # of each pass: int32 [num_rows + 1]


def medusa_nodes(layout: TreeLayout, logits: Tensor, token_ids: Tensor, top: TopTokens = top_tokens) -> Tensor:
    """A node's token is the head's of its depth, the same below every parent.

    Args:
        logits: float32 [num_rows, num_heads, draft_vocab], at least as many heads as the tree is deep.
        token_ids: int64 [draft_vocab], of the target's vocabulary.
    Returns:
        int64 [num_rows, num_drafted], of the nodes from 1 on.
    Raises:
        ValueError: the tree is deeper, or a node has more children than can be drafted.
    """
    num_rows, num_heads, _ = logits.shape
    if layout.tree.depth > num_heads:
        raise ValueError(
            f"the draft tree is {layout.tree.depth} levels deep, and there are {num_heads} Medusa heads: cut it to those"
        )
    width = max(_width(layout, depth, logits) for depth in range(layout.tree.depth))
    likeliest = top(logits.flatten(0, 1), width, token_ids).view(num_rows, num_heads, width)
    return likeliest[:, layout.depths, layout.all_ranks]


def eagle_nodes(
    layout: TreeLayout,
    features: Tensor,
    passes: Sequence[AttentionMetadata],
    run: Callable[[Tensor, Tensor, AttentionMetadata], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    top: TopTokens = top_tokens,
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
        logits = logits_of(features.flatten(0, 1))
        width = _width(layout, depth, logits)
        likeliest = top(logits, width, token_ids).view(num_rows, -1, width)
        levels.append(likeliest[:, parents, ranks])
        if depth < len(passes):
            inner = layout.inner_places[depth]
            before = features[:, layout.inner_parents[depth]]
            behind = run(levels[-1][:, inner].flatten(), before.flatten(0, 1), passes[depth])
            features = behind.view(num_rows, len(inner), -1)
    return torch.cat(levels, dim=1)


def _width(layout: TreeLayout, depth: int, logits: Tensor) -> int:
    """Most children of a node of that depth."""
    tree, num_tokens = layout.tree, logits.shape[-1]
    width = max(len(tree.children[node]) for node in tree.levels[depth])
    if width > num_tokens:
        raise ValueError(f"a node of the draft tree has {width} children, and {num_tokens} tokens can be drafted")
    return width
