"""Whole decode steps as CUDA graphs: one launch in place of hundreds, for batches of single-token rows.

A graph is captured for each of a short list of batch sizes; a batch takes the next larger one, and its padding rows read and
write the null block only. A graph works on tensors that stay where they are: a step first copies its arrays into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.sample.metadata import SamplingMetadata
from backend.worker.decoders import StepDecoder
from backend.worker.graph_pass import GraphPass, Keep
from backend.worker.input_batch import SAMPLED_TOKEN, RepeatInput, StepInput
from backend.worker.step_tensors import HostBuffers, write_parts
from kernels.ops.decode_positions import decode_positions
from kernels.ops.greedy_tokens import greedy_tokens
from kernels.ops.record_tokens import record_tokens

if TYPE_CHECKING:
    from backend.worker.draw_graphs import DrawGraphs

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
# With few requests, how attention is best cut depends on how long they are: those sizes have a second, shorter graph.
SHORT_CONTEXT = 4096
MAX_SIZE_WITH_SHORT = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Of every sampled row of the batch; overwritten by the next replay."""

    logits: Tensor  # float32 [num_rows, vocab_size]
    outcomes: Tensor  # int64 [num_rows], the greedy choice, or -1: no usable logits


@dataclass(frozen=True, slots=True)
class _Graph:
    size: int
    width: int  # blocks that a row of its table has
    graph: torch.cuda.CUDAGraph
    block_tables: Tensor  # int32 [num_groups, size, width]
    query_start_loc: Tensor  # int32 [size + 1]; kept because a replay may read it
    output: DecodeOutput
    left: GraphPass | None


class DecodeGraphs:
    """A step's arrays are copied into a graph's tensors; after that it moves on by itself, as long as the batch stays.

    Attributes:
        left: by the last replay; None where nothing is kept.

    Args:
    sampled_token_ids: int64, the last token of each row; the last row is the padding's.
    logits: float32 [max_num_reqs, vocab_size], where the graphs leave theirs.
    max_num_reqs: largest batch.
    max_num_blocks: blocks of the longest request.
    num_groups: KV groups of the model.
    draws: behind the graphs of steps.
    keep: what is to be kept of each pass; None: nothing.
    """

    def __init__(
        self,
        decoder: StepDecoder,
        attention: AttentionBackend,
        layer_caches: list[LayerCache],
        sampled_token_ids: Tensor,
        logits: Tensor,
        *,
        max_num_reqs: int,
        max_num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        draws: DrawGraphs,
        keep: Keep | None = None,
    ) -> None:
        self._keep = keep
        self.left: GraphPass | None = None
        self._decoder = decoder
        self._attention = attention
        self._layer_caches = layer_caches
        self._sampled_token_ids = sampled_token_ids
        self._device = sampled_token_ids.device
        self._block_size = block_size
        self._num_groups = num_groups
        self._padding_row = sampled_token_ids.numel() - 1
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._draws = draws
        self._last: _Graph | None = None  # the one whose tensors describe the step that follows
        self._sizes = [*(size for size in SIZES if size < max_num_reqs), max_num_reqs]
        short = SHORT_CONTEXT // block_size
        self._widths = (short, max_num_blocks) if max_num_blocks >= 2 * short else (max_num_blocks,)
        # Graphs never run at the same time: they share what they read.
        largest = self._sizes[-1]
        self._logits = logits
        num_entries = num_groups * largest * max_num_blocks
        self._inputs = torch.zeros(_num_input_bytes(largest) + 4 * num_entries, dtype=torch.uint8, device=self._device)
        self._block_tables = torch.zeros(num_entries, dtype=torch.int32, device=self._device)

    def __len__(self) -> int:
        return len(self._keys()) + len(self._sizes)

    @torch.inference_mode()
    def capture(self, pool: object, on_progress: Callable[[], None]) -> None:
        """Capture every graph, the largest first, so that the others fit into its memory."""
        for size, width in self._keys():
            self._graphs[size, width] = self._capture(size, width, pool)
            on_progress()
        for size in reversed(self._sizes):
            sampled_rows = self._rows(size)[2]
            sampled_rows.fill_(self._padding_row)  # other sizes have laid out theirs across it
            self._draws.capture(sampled_rows, pool)
            on_progress()

    @property
    def all_left(self) -> list[GraphPass]:
        """What each graph leaves."""
        return [graph.left for graph in self._graphs.values() if graph.left is not None]

    def _keys(self) -> list[tuple[int, int]]:
        return [(size, width) for size in reversed(self._sizes) for width in reversed(self._widths_of(size))]

    def fits(self, step: StepInput) -> bool:
        return step.num_decodes == step.num_reqs <= self._sizes[-1]

    def holds(self, num_blocks: int) -> bool:
        """Whether the last replay can go on with requests of up to so many blocks."""
        return self._last is not None and num_blocks <= self._last.width

    def forget(self) -> None:
        """Another kind of step comes between."""
        self._last = None

    def replay(self, step: StepInput, buffers: HostBuffers) -> DecodeOutput:
        """Start a step whose requests all have one token. Its rows' tokens become their last sampled ones."""
        _, num_reqs, num_blocks = step.block_tables.shape
        size = next(size for size in self._sizes if size >= num_reqs)
        width = next(width for width in self._widths_of(size) if width >= num_blocks)
        graph = self._graphs[size, width]

        fixed = np.empty((3, size), dtype=np.int64)
        fixed[0] = SAMPLED_TOKEN
        fixed[1:] = self._padding_row
        fixed[0, :num_reqs] = step.token_ids
        fixed[1, :num_reqs] = step.token_rows
        fixed[2, step.sampled_reqs] = step.sampled_rows
        seq_lens = np.zeros((_num_input_bytes(size) - 24 * size) // 4, dtype=np.int32)
        seq_lens[:num_reqs] = step.seq_lens
        host = buffers.next(_num_input_bytes(size) + step.block_tables.nbytes)
        write_parts(host, [fixed, seq_lens, np.ascontiguousarray(step.block_tables)])
        self._inputs[: host.numel()].copy_(host, non_blocking=True)
        entries = self._inputs[_num_input_bytes(size) : host.numel()].view(torch.int32).view(step.block_tables.shape)
        graph.block_tables[:, :num_reqs, :num_blocks].copy_(entries)
        self._last = graph
        return self._run(graph, num_reqs)

    def replay_again(self, step: RepeatInput, buffers: HostBuffers) -> DecodeOutput:
        """Start the step after the last one: same requests, each one token further."""
        graph = self._last
        assert graph is not None
        if step.new_blocks:
            groups, places, columns, block_ids = np.array(step.new_blocks, dtype=np.int64).T
            host = buffers.next(12 * len(places))
            write_parts(host, [(groups * graph.size + places) * graph.width + columns, block_ids.astype(np.int32)])
            remote = host.to(self._device, non_blocking=True)
            entries, ids = remote[: 8 * len(places)].view(torch.int64), remote[8 * len(places) :].view(torch.int32)
            graph.block_tables.view(-1).index_copy_(0, entries, ids)
        return self._run(graph, len(step.request_ids))

    def start_draws(self, sampling: SamplingMetadata, buffers: HostBuffers) -> None:
        """Say how the rows of the last step are sampled, and those of steps that repeat it."""
        self._draws.start(sampling.params, sampling.positions, buffers)

    def draw(self, num_reqs: int) -> Tensor:
        """Draw instead of choosing greedily, from the logits of the last step; see `DrawGraphs.replay`."""
        assert self._last is not None
        return self._draws.replay(self._last.size, num_reqs)

    def _run(self, graph: _Graph, num_reqs: int) -> DecodeOutput:
        graph.graph.replay()
        self.left = graph.left
        return DecodeOutput(graph.output.logits[:num_reqs], graph.output.outcomes[:num_reqs])

    def _widths_of(self, size: int) -> tuple[int, ...]:
        return self._widths if size <= MAX_SIZE_WITH_SHORT else self._widths[-1:]

    def _rows(self, size: int) -> Tensor:
        """int64 [3, size], where a graph reads each request's token, its row and, where it samples, its row again."""
        return self._inputs[: 24 * size].view(torch.int64).view(3, size)

    def _capture(self, size: int, width: int, pool: object) -> _Graph:
        inputs = self._inputs[: _num_input_bytes(size)]
        token_ids, rows, sampled_rows = self._rows(size)
        token_ids.fill_(SAMPLED_TOKEN)
        rows.fill_(self._padding_row)
        sampled_rows.fill_(self._padding_row)
        seq_lens = inputs[24 * size : 28 * size].view(torch.int32)
        seq_lens.zero_()
        num_entries = self._num_groups * size * width
        block_tables = self._block_tables[:num_entries].view(self._num_groups, size, width)
        query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=self._device)

        def run() -> tuple[DecodeOutput, GraphPass | None]:
            positions, slot_mapping = decode_positions(seq_lens, block_tables[0], self._block_size)
            metadata = AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens if self._keep is None else seq_lens.clone(),  # which grow before they are read
                block_table=block_tables[0],
                slot_mapping=slot_mapping,
                positions=positions,
                num_decodes=size,
            )
            if self._num_groups > 1:
                others = block_tables[1:].unbind()
                slots = [decode_positions(seq_lens, table, self._block_size)[1] for table in others]
                metadata = metadata.with_groups(others, slots)
            hidden = self._decoder.forward(
                token_ids, rows, self._sampled_token_ids, self._layer_caches, metadata, self._attention
            )
            left = None if self._keep is None else GraphPass(self._keep(hidden), rows, metadata)
            logits = self._decoder.compute_logits(hidden, output=self._logits[:size])
            chosen, finite = greedy_tokens(logits)
            outcomes = record_tokens(chosen, finite, sampled_rows, self._sampled_token_ids, seq_lens)
            return DecodeOutput(logits, outcomes), left

        graph, (output, left) = capture_graph(run, pool, self._device)
        return _Graph(size, width, graph, block_tables, query_start_loc, output, left)


def capture_graph(run: Callable[[], T], pool: object, device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run once, to compile and to let libraries allocate what they keep, then record.

    Of the tensors that `run` makes, only those that it returns may be read after a replay, as long as they are kept.
    """
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):  # type: ignore[arg-type]
        output = run()
    return graph, output


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for every engine of the process: libraries keep a workspace for each stream they see."""
    return torch.cuda.Stream(device)


def _num_input_bytes(size: int) -> int:
    """Three int64 arrays and one of int32, padded so that what follows is aligned."""
    return 24 * size + (4 * size + 7) // 8 * 8
