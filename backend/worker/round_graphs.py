"""Rounds of requests that all decode, greedily, as CUDA graphs: one for what drafts, one for what verifies, one for what a draft
head reads of it and drafts next. Nothing between them waits for the host, which sends one copy and gets one.

The head drafts the next round before the host has heard of this one: while it schedules, the device would have nothing to do.

A round takes the graphs of the next larger size and of the next longer draft; as in `DecodeGraphs`, padding reads and writes the
null block only. What one graph leaves for the next, or for the host, it leaves where no other writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.sample.rejection_sampler import RejectionSampler
from backend.spec_decode.proposer import ChainProposer, DraftChain, HeadProposer, TargetStep
from backend.worker.decode_graphs import capture_graph
from backend.worker.decoders import StepDecoder
from backend.worker.graph_pass import Keep
from backend.worker.round_download import pack_round
from backend.worker.round_tensors import RoundArrays, RoundLayout
from backend.worker.speculative_batch import RoundInput
from backend.worker.step_tensors import HostBuffers, write_parts
from kernels.ops.decode_positions import decode_positions

SIZES = (1, 2, 4, 8, 16, 32)  # requests; more take so long that launching their kernels one by one costs little


def round_rows(max_num_reqs: int, num_speculative_tokens: int) -> int:
    """Rows of logits of the largest round."""
    return min(max_num_reqs, SIZES[-1]) * (num_speculative_tokens + 1)


def num_round_graphs(num_speculative_tokens: int) -> int:
    """Sizes and lengths of which there are graphs, at most."""
    return len(SIZES) * len(_draft_lengths(num_speculative_tokens))


@dataclass(frozen=True, slots=True)
class RoundParts:
    """What the graphs of rounds are made of.

    Attributes:
        last_token_ids: int64, of each row of the batch; the last row is the padding's.
        logits: float32 [num_rows, vocab_size], at least `round_rows`: where the graphs leave theirs.
        sampler: on the kernels' own ops.
        record_tokens: the op of that name.
        chain: the proposer, if graphs can hold its drafts.
        head: the proposer, if it reads the target's steps; it needs `keep`.
        keep: what is to be kept of each pass of the target.
    """

    decoder: StepDecoder
    attention: AttentionBackend
    layer_caches: list[LayerCache]
    last_token_ids: Tensor
    logits: Tensor
    sampler: RejectionSampler
    record_tokens: Callable[..., Tensor]
    chain: ChainProposer | None
    head: HeadProposer | None
    keep: Keep | None


@dataclass(frozen=True, slots=True)
class _Left:
    """What the verification leaves."""

    packed: Tensor  # uint8, see `pack_round`
    states: Tensor | None  # float [size * (k + 1), hidden], what `keep` gave
    next_token_ids: Tensor  # int64 [size * (k + 1)], of each token of the step
    last_indices: Tensor  # int64 [size], of each row's last token that was not rejected


@dataclass(frozen=True, slots=True)
class _Graphs:
    layout: RoundLayout
    block_tables: Tensor  # int32 [num_groups, size, max_num_blocks]
    constant: Tensor  # kept because a replay may read it
    draft: torch.cuda.CUDAGraph | None
    verify: torch.cuda.CUDAGraph
    left: _Left
    go_on: torch.cuda.CUDAGraph | None


class RoundGraphs:
    """
    Attributes:
        drafts: int64 [num_rows, num_speculative_tokens], what is verified, for each row of the batch: from graphs, or put there.

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
        self._padding_row = parts.last_token_ids.numel() - 1
        largest = min(max_num_reqs, SIZES[-1])
        self._sizes = [*(size for size in SIZES if size < largest), largest]
        self._lengths = _draft_lengths(num_speculative_tokens)
        self._graphs: dict[tuple[int, int], _Graphs] = {}
        self._round: _Graphs | None = None
        # Graphs never run at the same time: they share what they read.
        num_rows = parts.last_token_ids.numel()
        self.drafts = torch.zeros(num_rows, num_speculative_tokens, dtype=torch.int64, device=self._device)
        num_bytes = RoundLayout(largest, num_speculative_tokens, num_groups).num_bytes
        num_entries = num_groups * largest * max_num_blocks
        self._inputs = torch.zeros(num_bytes + 4 * num_entries, dtype=torch.uint8, device=self._device)
        self._block_tables = torch.zeros(num_entries, dtype=torch.int32, device=self._device)
        # Of each token: no token is negative, so that it does not matter.
        self._any_row = torch.zeros(largest * (num_speculative_tokens + 1), dtype=torch.int64, device=self._device)

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

    def start(self, step: RoundInput, buffers: HostBuffers) -> int:
        """Upload a round, at least one request of which has drafts. Returns how many tokens its graphs draft."""
        num_reqs, longest = len(step.rows), int(step.num_draft_tokens.max())
        size = next(size for size in self._sizes if size >= num_reqs)
        length = next(length for length in self._lengths if length >= longest)
        graphs = self._round = self._graphs[size, length]
        layout = graphs.layout
        host = buffers.next(layout.num_bytes + step.block_tables.nbytes)
        layout.write(host, step, self._padding_row)
        write_parts(host[layout.num_bytes :], [step.block_tables])
        self._inputs[: host.numel()].copy_(host, non_blocking=True)
        entries = self._inputs[layout.num_bytes : host.numel()].view(torch.int32).view(step.block_tables.shape)
        graphs.block_tables[:, :num_reqs, : entries.shape[2]].copy_(entries)
        return length

    def draft(self) -> None:
        """Make the drafts of the round that was started."""
        assert self._round is not None
        assert self._round.draft is not None
        self._round.draft.replay()

    def verify(self) -> tuple[Tensor, tuple[int, int]]:
        """Verify them and record the tokens: the round packed, as `pack_round` does it, and the shape of its drafts."""
        assert self._round is not None
        self._round.verify.replay()
        return self._round.left.packed, (self._round.layout.size, self._round.layout.k)

    def go_on(self) -> None:
        """Let the head read what the verification left, and draft behind it."""
        assert self._round is not None
        assert self._round.go_on is not None
        self._round.go_on.replay()

    def _capture(self, size: int, k: int, pool: object) -> _Graphs:
        parts, device = self._parts, self._device
        layout = RoundLayout(size, k, self._num_groups)
        inputs = self._inputs[: layout.num_bytes]
        inputs.zero_()
        arrays = layout.views(inputs)
        arrays.rows.fill_(self._padding_row)
        num_entries = self._num_groups * size * self._max_num_blocks
        block_tables = self._block_tables[:num_entries].view(self._num_groups, size, self._max_num_blocks)
        counting = torch.arange(size + 1, dtype=torch.int32, device=device)
        chain, head = parts.chain, parts.head
        draft = go_on = None
        if chain is not None:

            def run_draft() -> None:
                last_token_ids = parts.last_token_ids.index_select(0, arrays.rows)
                drafted = chain.draft(layout.chain(arrays, block_tables, last_token_ids, counting))
                self.drafts[:, :k].index_copy_(0, arrays.rows, drafted)

            draft, _ = capture_graph(run_draft, pool, device)
        verify, left = capture_graph(lambda: self._verify(layout, arrays, block_tables), pool, device)
        if head is not None:
            assert left.states is not None
            for tensor in (left.states, left.next_token_ids, left.last_indices):
                tensor.zero_()  # a capture computes nothing
            step = TargetStep(
                states=left.states,
                next_token_ids=left.next_token_ids,
                metadata=layout.metadata(arrays, block_tables),
                rows=arrays.rows,
                last_indices=left.last_indices,
            )

            def run_on() -> None:
                head.read(step)
                last_token_ids = parts.last_token_ids.index_select(0, arrays.rows)
                passes = self._next_passes(layout, arrays, left, block_tables, counting)
                self.drafts[:, :k].index_copy_(
                    0, arrays.rows, head.draft(DraftChain(last_token_ids, arrays.rows, passes))
                )

            go_on, _ = capture_graph(run_on, pool, device)
        return _Graphs(layout, block_tables, counting, draft, verify, left, go_on)

    def _next_passes(
        self, layout: RoundLayout, arrays: RoundArrays, left: _Left, block_tables: Tensor, counting: Tensor
    ) -> list[AttentionMetadata]:
        """Those of `DraftChain` behind what has just been verified. Entries for which there is no block yet are lost."""
        num_more = left.last_indices - arrays.starts + 1 - arrays.counts
        num_tokens = (arrays.seq_lens + num_more).where(arrays.seq_lens > 0, -layout.k)
        columns = torch.arange(layout.k + 1, device=self._device)[:, None]
        seq_lens = (num_tokens + columns).clamp(min=0, max=self._max_model_len).int()
        found = [
            decode_positions(seq_lens.view(-1), table.repeat(layout.k + 1, 1), self._block_size)
            for table in block_tables
        ]
        positions = found[0][0].view(seq_lens.shape)
        slot_mappings = [slots.view(seq_lens.shape) for _, slots in found]
        return [
            AttentionMetadata(
                query_start_loc=counting,
                seq_lens=seq_lens[index],
                block_table=block_tables[0],
                slot_mapping=slot_mappings[0][index],
                positions=positions[index],
                num_decodes=layout.size,
            ).with_groups(block_tables[1:], [slots[index] for slots in slot_mappings[1:]])
            for index in range(layout.k + 1)
        ]

    def _verify(self, layout: RoundLayout, arrays: RoundArrays, block_tables: Tensor) -> _Left:
        parts, size, k = self._parts, layout.size, layout.k
        drafts = self.drafts[:, :k].index_select(0, arrays.rows)
        last_token_ids = parts.last_token_ids.index_select(0, arrays.rows)
        token_ids = torch.cat((last_token_ids[:, None], drafts), dim=1).view(-1).index_select(0, arrays.sources)
        hidden = parts.decoder.forward(
            token_ids,
            self._any_row[: size * (k + 1)],
            parts.last_token_ids,
            parts.layer_caches,
            layout.metadata(arrays, block_tables),
            parts.attention,
        )
        states = parts.keep(hidden) if parts.keep is not None else None
        output = parts.logits[: size * (k + 1)]
        logits = parts.decoder.compute_logits(hidden.index_select(0, arrays.places.view(-1)), output=output)
        verified = parts.sampler(logits.view(size, k + 1, -1), drafts, arrays.counts, None, None)
        last = verified.token_ids.gather(1, verified.num_accepted[:, None])[:, 0]
        parts.record_tokens(last, verified.finite, arrays.rows, parts.last_token_ids)
        # None behind a rejected one.
        following = verified.token_ids.clamp(min=0).view(-1).index_select(0, arrays.sources)
        return _Left(pack_round(verified, drafts), states, following, arrays.starts + verified.num_accepted)


def _draft_lengths(longest: int) -> list[int]:
    """For which there are graphs, ascending: each half as long as the next, so that few passes are wasted."""
    lengths = [longest]
    while lengths[0] > 1:
        lengths.insert(0, lengths[0] // 2)
    return lengths
