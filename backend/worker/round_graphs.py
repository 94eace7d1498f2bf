"""Rounds of requests that all decode as CUDA graphs: one for what drafts, one for what verifies, one for what a draft
head reads of it and drafts next, or for what is looked up next in the texts. Nothing between them waits for the host, which
sends one copy and gets one.

The next round is drafted before the host has heard of this one: while it schedules, the device would have nothing to do.

Drafts are greedy ones, also of sampled requests: those draw the target's token of each position as plain decoding does, and a
draft is accepted if it is that one.

A round takes the graphs of the next larger size and of the next longer draft; as in `DecodeGraphs`, padding reads and writes the
null block only. What one graph leaves for the next, or for the host, it leaves where no other writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.core.draft_cost import MAX_CONTINUED, graph_lengths
from backend.spec_decode.proposer import ChainProposer, DraftChain, HeadProposer, TargetStep
from backend.worker.decode_graphs import capture_graph
from backend.worker.decoders import StepDecoder
from backend.worker.graph_pass import Keep
from backend.worker.round_download import packed_ids
from backend.worker.round_ops import RoundOps
from backend.worker.round_tensors import RoundRows, RoundUploads, round_chain, round_metadata
from backend.worker.round_texts import RoundTexts
from backend.worker.speculative_batch import RoundInput
from backend.worker.step_tensors import HostBuffers
from kernels.ops.draft_positions import draft_positions
from kernels.reference.round_positions import RoundPositions

# Requests; more take so long that launching their kernels one by one costs little.
SIZES = (1, 2, 4, 8, 16, MAX_CONTINUED)


def round_rows(max_num_reqs: int, num_speculative_tokens: int) -> int:
    """Rows of logits of the largest round."""
    return min(max_num_reqs, SIZES[-1]) * (num_speculative_tokens + 1)


def num_round_graphs(num_speculative_tokens: int) -> int:
    """Sizes and lengths of which there are graphs, at most."""
    return len(SIZES) * len(graph_lengths(num_speculative_tokens))


@dataclass(frozen=True, slots=True)
class RoundParts:
    """What the graphs of rounds are made of.

    Attributes:
        last_token_ids: int64, of each row of the batch; the last row is the padding's.
        logits: float32 [num_rows, vocab_size], at least `round_rows`: where the graphs leave theirs.
        ops: for what is not the model.
        chain: the proposer, if graphs can hold its drafts.
        head: the proposer, if it reads the target's steps; it needs `keep`.
        keep: what is to be kept of each pass of the target.
        texts: where the device looks up the drafts of rounds behind the first, which then is the host's; there is no `chain`.
    """

    decoder: StepDecoder
    attention: AttentionBackend
    layer_caches: list[LayerCache]
    last_token_ids: Tensor
    logits: Tensor
    ops: RoundOps
    chain: ChainProposer | None
    head: HeadProposer | None
    keep: Keep | None
    texts: RoundTexts | None


@dataclass(frozen=True, slots=True)
class _Left:
    """What the verification leaves."""

    packed: Tensor  # uint8, see `verify_chain`
    states: Tensor | None  # float [size * (k + 1), hidden], what `keep` gave
    next_token_ids: Tensor  # int64 [size * (k + 1)], of each token of the step
    last_indices: Tensor  # int64 [size], of each row's last token that was not rejected
    placed: RoundPositions


@dataclass(frozen=True, slots=True)
class _Graphs:
    shape: tuple[int, int]  # rows, drafts of each
    block_tables: Tensor  # int32 [num_groups, size, max_num_blocks]
    constant: Tensor  # kept because a replay may read it
    draft: torch.cuda.CUDAGraph | None
    verify: torch.cuda.CUDAGraph
    left: _Left
    go_on: torch.cuda.CUDAGraph | None


class RoundGraphs:
    """
    Attributes:
        longest: most drafts of a row.
        drafts: int64 [num_rows, num_speculative_tokens], what is verified, for each row of the batch.

    Args:
        num_speculative_tokens: most of a draft.
        max_model_len: longest request, in tokens.
        max_num_reqs: most requests of a step.
        num_groups: KV groups of the model.
    """

    def __init__(
        self,
        parts: RoundParts,
        *,
        num_speculative_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
    ) -> None:
        max_num_blocks = -(-max_model_len // block_size)
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._parts = parts
        self._device = parts.last_token_ids.device
        self._num_groups = num_groups
        self._max_num_blocks = max_num_blocks
        largest = min(max_num_reqs, SIZES[-1])
        self._sizes = [*(size for size in SIZES if size < largest), largest]
        self.longest = num_speculative_tokens
        self._lengths = graph_lengths(num_speculative_tokens)
        self._graphs: dict[tuple[int, int], _Graphs] = {}
        self._round: _Graphs | None = None
        # Graphs never run at the same time: they share what they read.
        num_rows = parts.last_token_ids.numel()
        self.drafts = torch.zeros(num_rows, num_speculative_tokens, dtype=torch.int64, device=self._device)
        num_entries = num_groups * largest * max_num_blocks
        self._uploads = RoundUploads(largest, num_speculative_tokens, num_rows - 1, self._device)
        self._block_tables = torch.zeros(num_entries, dtype=torch.int32, device=self._device)
        # Of each token: no token is negative, so that it does not matter.
        self._any_row = torch.zeros(largest * (num_speculative_tokens + 1), dtype=torch.int64, device=self._device)
        self._places = torch.arange(
            -1, num_speculative_tokens + 1, device=self._device
        )  # of a chain's tokens, from 1 on

    def __len__(self) -> int:
        return len(self._sizes) * len(self._lengths)

    @torch.inference_mode()
    def capture(self, pool: object, on_progress: Callable[[], None]) -> None:
        """Capture every graph, the largest first; `on_progress` is called for those of each size and length."""
        for size in reversed(self._sizes):
            for length in reversed(self._lengths):
                self._graphs[size, length] = self._capture(size, length, pool)
                on_progress()

    def fits(self, num_reqs: int) -> bool:
        return num_reqs <= self._sizes[-1]

    def num_slots_to_draft(self, num_tokens: int, count: int) -> int:
        """That a request of so many tokens needs for a draft: of all but the last of it."""
        return num_tokens + count - 2

    def start(
        self,
        step: RoundInput,
        buffers: HostBuffers,
        drafts: np.ndarray | None = None,
        num_granted: np.ndarray | None = None,
    ) -> int:
        """Upload a round, at least one request of which has drafts. Returns how many tokens its graphs draft.

        Args:
            drafts: int64 [num_granted, up to k], where the host makes them; else they are those of `drafts`.
            num_granted: int64 [num_granted], most tokens of each, where the next ones are looked up.
        """
        num_reqs = len(step.rows)
        longest = int((step.num_draft_tokens if num_granted is None else num_granted).max())
        size = next(size for size in self._sizes if size >= num_reqs)
        length = next(length for length in self._lengths if length >= longest)
        self._round = self._graphs[size, length]
        self._uploads.upload(step, size, length if drafts is not None else 0, buffers, drafts, num_granted)
        self._uploads.upload_tables(step.tables, self._round.block_tables, buffers)
        return length

    def start_again(self, step: RoundInput, buffers: HostBuffers) -> None:
        """Begin another round of the rows of the last one, with the drafts that it has left."""
        assert self._round is not None
        self._uploads.upload_tables(step.tables, self._round.block_tables, buffers)

    def draft(self) -> None:
        """Make the drafts of the round that was started."""
        assert self._round is not None
        assert self._round.draft is not None
        self._round.draft.replay()

    def verify(self) -> tuple[Tensor, tuple[int, int]]:
        """Verify them and record the tokens: the round packed, as `verify_chain` does it, and the shape of its drafts."""
        assert self._round is not None
        self._round.verify.replay()
        return self._round.left.packed, self._round.shape

    def go_on(self) -> None:
        """Let the head read what the verification left, and draft behind it; or look the next drafts up."""
        assert self._round is not None
        assert self._round.go_on is not None
        self._round.go_on.replay()

    def _capture(self, size: int, k: int, pool: object) -> _Graphs:
        parts, device = self._parts, self._device
        rows = self._uploads.padding(size, k)
        num_entries = self._num_groups * size * self._max_num_blocks
        block_tables = self._block_tables[:num_entries].view(self._num_groups, size, self._max_num_blocks)
        counting = torch.arange(size + 1, dtype=torch.int32, device=device)
        chain, head, texts = parts.chain, parts.head, parts.texts
        draft = go_on = None
        if chain is not None:

            def run_draft() -> None:
                last_token_ids = parts.last_token_ids.index_select(0, rows.rows)
                placed = self._place(rows, block_tables, k)
                drafted = chain.draft(round_chain(placed, rows.rows, block_tables, last_token_ids, counting))
                self.drafts[:, :k].index_copy_(0, rows.rows, drafted)

            draft, _ = capture_graph(run_draft, pool, device)
        verify, left = capture_graph(lambda: self._verify(rows, block_tables, k), pool, device)
        if head is not None:
            assert left.states is not None
            for tensor in (left.states, left.next_token_ids, left.last_indices, *left.placed):
                tensor.zero_()  # a capture computes nothing
            step = TargetStep(
                states=left.states,
                next_token_ids=left.next_token_ids,
                metadata=round_metadata(left.placed, block_tables),
                rows=rows.rows,
                last_indices=left.last_indices,
            )

            def run_on() -> None:
                head.read(step)
                last_token_ids = parts.last_token_ids.index_select(0, rows.rows)
                passes = self._next_passes(rows, left, block_tables, counting, k)
                self.drafts[:, :k].index_copy_(0, rows.rows, head.draft(DraftChain(last_token_ids, rows.rows, passes)))

            go_on, _ = capture_graph(run_on, pool, device)
        elif texts is not None:
            left.packed.zero_()
            ids = packed_ids(left.packed, size, k)
            go_on, _ = capture_graph(lambda: texts.draft(ids, rows), pool, device)
        return _Graphs((size, k), block_tables, counting, draft, verify, left, go_on)

    def _place(self, rows: RoundRows, block_tables: Tensor, k: int) -> RoundPositions:
        return self._parts.ops.round_positions(rows.counts, rows.num_computed, block_tables, k + 1, self._block_size)

    def _next_passes(
        self, rows: RoundRows, left: _Left, block_tables: Tensor, counting: Tensor, k: int
    ) -> list[AttentionMetadata]:
        """Those of `DraftChain` behind what has just been verified. Entries for which there is no block yet are lost."""
        seq_lens, positions, slot_mappings = draft_positions(
            left.placed.starts,
            rows.counts,
            left.last_indices,
            left.placed.seq_lens,
            block_tables,
            k + 1,
            self._block_size,
            self._max_model_len,
        )
        return [
            AttentionMetadata(
                query_start_loc=counting,
                seq_lens=seq_lens[index],
                block_table=block_tables[0],
                slot_mapping=slot_mappings[0, index],
                positions=positions[index],
                num_decodes=len(rows.rows),
            ).with_groups(block_tables[1:], slot_mappings[1:, index])
            for index in range(k + 1)
        ]

    def _verify(self, rows: RoundRows, block_tables: Tensor, k: int) -> _Left:
        parts, ops, last_token_ids = self._parts, self._parts.ops, self._parts.last_token_ids
        placed = self._place(rows, block_tables, k)
        num_tokens = len(placed.positions)
        if parts.chain is None:
            self.drafts[:, :k].index_copy_(0, rows.rows, rows.drafts)
        token_ids, drafts = ops.gather_round(last_token_ids, self.drafts[:, :k], rows.rows, placed.sources)
        hidden = parts.decoder.forward(
            token_ids,
            self._any_row[:num_tokens],
            last_token_ids,
            parts.layer_caches,
            round_metadata(placed, block_tables),
            parts.attention,
        )
        states = parts.keep(hidden) if parts.keep is not None else None
        output = parts.logits[:num_tokens]
        logits = parts.decoder.compute_logits(hidden.index_select(0, placed.places.view(-1)), output=output)
        sampled = rows.sample(ops.sample_nodes, logits, drafts, self._places[: k + 1], self._places[1 : k + 2])
        packed, ids = ops.verify_chain(logits, drafts, rows.counts, sampled)
        # For the next round, if that begins without the host.
        lengths = rows.num_computed
        following = ops.settle_round(ids, rows.rows, placed.starts, placed.sources, last_token_ids, lengths)
        return _Left(packed, states, *following, placed)
