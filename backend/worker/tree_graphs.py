"""Rounds of draft trees as CUDA graphs, in the manner of `RoundGraphs`: one drafts, one verifies, and one lets the head
read what was verified, moves the accepted nodes to their places and drafts the next tree.

All trees have one shape, of which a request has the first nodes, as many as it may: so there is one graph of each for a size.
Where a node stands and what it sees of the others is fixed; a request adds where its text ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.compaction import KVCompaction
from backend.attention.metadata import AttentionMetadata
from backend.core.output import PendingOutput
from backend.core.speculative_scheduler import MAX_TREE_REQS
from backend.spec_decode.draft_tree import DraftTree
from backend.spec_decode.proposer import TargetStep
from backend.spec_decode.tree_proposers import TreeProposer
from backend.worker.decode_graphs import capture_graph
from backend.worker.graph_rounds import GraphRounds
from backend.worker.round_download import RoundDownload
from backend.worker.round_graphs import RoundParts
from backend.worker.round_tensors import RoundRows, RoundUploads, round_metadata
from backend.worker.speculative_batch import RoundInput
from backend.worker.step_tensors import HostBuffers
from backend.worker.tree_rounds import PathDownload
from kernels.reference.round_positions import RoundPositions
from kernels.reference.sample_nodes import SampledNodes
from kernels.reference.verify_tree import TreeRound

SIZES = (1, 2, 4, 8, MAX_TREE_REQS)  # requests

# An implementation of `verify_tree`.
VerifyTree = Callable[[Tensor, Tensor, Tensor, Tensor, int, SampledNodes], TreeRound]


def tree_round_rows(max_num_reqs: int, tree: DraftTree) -> int:
    """Rows of logits of the largest round."""
    return min(max_num_reqs, SIZES[-1]) * len(tree)


@dataclass(frozen=True, slots=True)
class TreeParts:
    """What the graphs of trees are made of beside `RoundParts`."""

    tree: DraftTree
    proposer: TreeProposer
    verify: VerifyTree
    compact: KVCompaction


@dataclass(frozen=True, slots=True)
class _Left:
    """What the verification leaves."""

    packed: Tensor  # uint8, see `verify_tree`
    states: Tensor  # float [size * num_nodes, hidden], what `keep` gave
    next_token_ids: Tensor  # int64 [size * num_nodes], of each token of the step
    last_nodes: Tensor  # int64 [size]
    accepted_nodes: Tensor  # int64 [size, depth]
    num_accepted: Tensor  # int64 [size]
    placed: RoundPositions  # at the positions of nodes
    tree_mask: Tensor  # int64 [size * num_nodes]
    tree_starts: Tensor  # int32 [size]

    def metadata(self, block_tables: Tensor) -> AttentionMetadata:
        return round_metadata(self.placed, block_tables).with_trees(self.tree_mask, self.tree_starts)


@dataclass(frozen=True, slots=True)
class _Graphs:
    size: int
    block_tables: Tensor  # int32 [num_groups, size, max_num_blocks]
    draft: torch.cuda.CUDAGraph
    verify: torch.cuda.CUDAGraph
    left: _Left
    go_on: torch.cuda.CUDAGraph


class TreeGraphs:
    """
    Attributes:
        longest: most slots that a round, or the draft behind it, needs behind a request's blocks or its last token.
        drafts: int64 [num_rows, num_drafted], the nodes that are verified, for each row of the batch.

    Args:
        max_model_len: longest request, in tokens.
        max_num_reqs: most requests of a step.
        num_groups: KV groups of the model.
    """

    def __init__(
        self,
        parts: RoundParts,
        trees: TreeParts,
        *,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
    ) -> None:
        tree, device = trees.tree, parts.last_token_ids.device
        self._parts, self._trees, self._device = parts, trees, device
        self._block_size, self._num_groups = block_size, num_groups
        largest = min(max_num_reqs, SIZES[-1])
        self._sizes = [*(size for size in SIZES if size < largest), largest]
        # The entries that a head needs for the first nodes: their parents, but the root.
        self._num_entries = [len({*tree.parents[1 : count + 1]} - {0}) for count in range(len(tree))]
        self.longest = max(tree.num_drafted, tree.depth + self._num_entries[-1])
        # A draft behind the end of the longest request asks for places that nobody has.
        self._max_num_blocks = -(-(max_model_len + 1 + self.longest) // block_size)
        self._graphs: dict[int, _Graphs] = {}
        self._round: _Graphs | None = None
        num_rows = parts.last_token_ids.numel()
        self.drafts = torch.zeros(num_rows, tree.num_drafted, dtype=torch.int64, device=device)
        # Each graph has tables of its own, whose last columns stay zero.
        self._uploads = RoundUploads(largest, 0, num_rows - 1, device)
        self._any_row = torch.zeros(largest * len(tree), dtype=torch.int64, device=device)  # no token is negative
        self._depths = torch.tensor(tree.depths, device=device)
        self._masks = torch.tensor(tree.masks, device=device)
        self._parents = torch.tensor(tree.parents, device=device)

    def __len__(self) -> int:
        return len(self._sizes)

    @torch.inference_mode()
    def capture(self, pool: object, on_progress: Callable[[], None]) -> None:
        """Capture every graph, the largest first; `on_progress` is called for those of each size."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, pool)
            on_progress()

    def fits(self, num_reqs: int) -> bool:
        return num_reqs <= self._sizes[-1]

    def num_slots_to_draft(self, num_tokens: int, count: int) -> int:
        """See `RoundGraphs`."""
        return num_tokens - 1 + self._num_entries[count]

    def start(self, step: RoundInput, buffers: HostBuffers, drafts: np.ndarray | None = None) -> int:
        """Upload a round, at least one request of which has drafts. Returns how many nodes its graphs draft."""
        assert drafts is None  # they come from the device
        num_reqs = len(step.rows)
        size = next(size for size in self._sizes if size >= num_reqs)
        graphs = self._round = self._graphs[size]
        self._uploads.upload(step, size, 0, buffers)
        self._uploads.upload_tables(step.tables, graphs.block_tables, buffers)
        return self._trees.tree.num_drafted

    def draft(self) -> None:
        """Make the drafts of the round that was started."""
        assert self._round is not None
        self._round.draft.replay()

    def verify(self) -> tuple[Tensor, tuple[int, int]]:
        """Verify them and record the tokens: the round packed, as `verify_tree` does it, and the shape of its paths."""
        assert self._round is not None
        self._round.verify.replay()
        return self._round.left.packed, (self._round.size, self._trees.tree.depth)

    def go_on(self) -> None:
        """Let the head read what the verification left, compact it, and draft behind it."""
        assert self._round is not None
        self._round.go_on.replay()

    def _capture(self, size: int, pool: object) -> _Graphs:
        rows = self._uploads.padding(size, 0)
        shape = (self._num_groups, size, self._max_num_blocks)
        block_tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        # No request: no token.
        draft, _ = capture_graph(lambda: self._draft(rows, rows.num_computed + 1, block_tables), pool, self._device)
        verify, left = capture_graph(lambda: self._verify(rows, block_tables), pool, self._device)
        given = (left.states, left.next_token_ids, left.last_nodes, left.accepted_nodes, left.num_accepted)
        for tensor in (*given, *left.placed, left.tree_mask, left.tree_starts):
            tensor.zero_()  # a capture computes nothing
        go_on, _ = capture_graph(lambda: self._go_on(rows, left, block_tables), pool, self._device)
        return _Graphs(size, block_tables, draft, verify, left, go_on)

    def _draft(self, rows: RoundRows, num_tokens: Tensor, block_tables: Tensor) -> None:
        nodes = self._trees.proposer.draft_nodes(rows.rows, num_tokens, block_tables[0])
        self.drafts.index_copy_(0, rows.rows, nodes)

    def _verify(self, rows: RoundRows, block_tables: Tensor) -> _Left:
        parts, trees, last_token_ids = self._parts, self._trees, self._parts.last_token_ids
        num_nodes = len(trees.tree)
        placed = parts.ops.round_positions(rows.counts, rows.num_computed, block_tables, num_nodes, self._block_size)
        num_tokens = len(placed.positions)
        # Slots are one behind the other, and positions are as deep as the nodes.
        nodes, starts = placed.sources % num_nodes, rows.num_computed.clamp(min=0)
        depths, begins = self._depths.index_select(0, nodes), starts.index_select(0, placed.sources // num_nodes)
        placed = placed._replace(positions=begins + depths)
        tree_mask, tree_starts = self._masks.index_select(0, nodes), starts.int()
        metadata = round_metadata(placed, block_tables).with_trees(tree_mask, tree_starts)
        token_ids, drafts = parts.ops.gather_round(last_token_ids, self.drafts, rows.rows, placed.sources)
        hidden = parts.decoder.forward(
            token_ids, self._any_row[:num_tokens], last_token_ids, parts.layer_caches, metadata, parts.attention
        )
        assert parts.keep is not None
        states = parts.keep(hidden)
        output = parts.logits[:num_tokens]
        logits = parts.decoder.compute_logits(hidden.index_select(0, placed.places.view(-1)), output=output)
        sampled = rows.sample(parts.ops.sample_nodes, logits, drafts, self._parents, self._depths)
        found = trees.verify(logits, drafts, rows.counts, self._parents, trees.tree.depth, sampled)
        num_accepted = found.ids[:, trees.tree.depth + 1]
        last_token_ids.index_copy_(0, rows.rows, found.ids.gather(1, num_accepted[:, None])[:, 0])
        return _Left(
            packed=found.packed,
            states=states,
            next_token_ids=found.next_token_ids.view(-1).index_select(0, placed.sources),
            last_nodes=found.last_nodes,
            accepted_nodes=found.accepted_nodes,
            num_accepted=num_accepted,
            placed=placed,
            tree_mask=tree_mask,
            tree_starts=tree_starts,
        )

    def _go_on(self, rows: RoundRows, left: _Left, block_tables: Tensor) -> None:
        metadata, roots = left.metadata(block_tables), left.placed.starts
        lasts = roots + left.last_nodes
        self._trees.proposer.read(TargetStep(left.states, left.next_token_ids, metadata, rows.rows, lasts))
        self._trees.compact(metadata, roots, left.accepted_nodes)
        # Behind each request's last token and the accepted ones there is one more.
        num_tokens = (rows.num_computed + left.num_accepted + 2).where(rows.num_computed >= 0, 0)
        self._draft(rows, num_tokens, block_tables)


class TreeGraphRounds(GraphRounds):
    """`GraphRounds` of trees."""

    def _told(self, download: RoundDownload) -> PendingOutput:
        return PathDownload(download)
