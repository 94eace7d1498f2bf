"""Whole steps of chunks and single-token rows as CUDA graphs: many a step is otherwise the time to launch it.

As `DecodeGraphs`, for any mix of query lengths up to some number of tokens. Padding tokens belong to no request, and write to
the null block only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import LayerCache
from backend.worker.decode_graphs import DecodeOutput, capture_graph
from backend.worker.decoders import StepDecoder
from backend.worker.graph_pass import GraphPass, Keep
from backend.worker.graph_sizes import choose_size, mixed_sizes
from backend.worker.input_batch import SAMPLED_TOKEN, StepInput
from backend.worker.step_tensors import HostBuffers, StepTensors, device_views, step_arrays, write_parts
from kernels.ops.greedy_tokens import greedy_tokens
from kernels.ops.record_tokens import record_tokens


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    tensors: StepTensors  # what a replay reads
    output: DecodeOutput
    left: GraphPass | None


class MixedGraphs:
    """
    Attributes:
        left: by the last replay; None where nothing is kept.

    Args:
    sampled_token_ids: int64, the last token of each row; the last row is the padding's.
    logits: float32 [num_rows, vocab_size], where the graphs leave theirs: a step has no more that it wants.
    max_num_tokens: token budget of a step.
    max_num_reqs: most requests of a step; one with more is launched op by op.
    max_num_blocks: blocks of the longest request.
    num_groups: KV groups of the model.
    keep: what is to be kept of each pass; None: nothing.
    has_trees: whether rows may be nodes of trees.
    """

    def __init__(
        self,
        decoder: StepDecoder,
        attention: AttentionBackend,
        layer_caches: list[LayerCache],
        sampled_token_ids: Tensor,
        logits: Tensor,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_num_blocks: int,
        num_groups: int = 1,
        keep: Keep | None = None,
        has_trees: bool = False,
    ) -> None:
        self._keep = keep
        self.left: GraphPass | None = None
        self._decoder = decoder
        self._attention = attention
        self._layer_caches = layer_caches
        self._sampled_token_ids = sampled_token_ids
        self._device = sampled_token_ids.device
        self._padding_row = sampled_token_ids.numel() - 1
        self._max_num_reqs = max_num_reqs
        self._num_groups = num_groups
        self._sizes = mixed_sizes(max_num_tokens, decoder.launch_bound)
        self._graphs: dict[int, _Graph] = {}
        self._logits = logits
        largest = self._padding(self._sizes[-1]) if self._sizes else None
        num_bytes = sum(array.nbytes for array in step_arrays(largest)) if largest else 0
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._block_tables = torch.zeros(
            num_groups, max_num_reqs, max_num_blocks, dtype=torch.int32, device=self._device
        )
        self._trees = _Trees(self._sizes[-1], max_num_reqs, self._device) if has_trees and self._sizes else None

    def __len__(self) -> int:
        return len(self._sizes)

    @torch.inference_mode()
    def capture(self, pool: object, on_progress: Callable[[], None]) -> None:
        """Capture every graph, the largest first; `on_progress` is called for each."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, pool)
            on_progress()

    @property
    def all_left(self) -> list[GraphPass]:
        """What each graph leaves."""
        return [graph.left for graph in self._graphs.values() if graph.left is not None]

    def fits(self, step: StepInput) -> bool:
        fits = step.num_reqs <= self._max_num_reqs and len(step.logits_indices) <= len(self._logits)
        return fits and self._size(len(step.token_ids)) is not None

    def replay(
        self,
        step: StepInput,
        buffers: HostBuffers,
        fill: Callable[[Tensor], None] = lambda token_ids: None,
        trees: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> DecodeOutput:
        """Start a step; the output has a row for each of its `logits_indices`, in order.

        Args:
            fill: gets the step's tokens on the device, int64, and may put some there that the host does not know.
            trees: int64 [num_tokens] and int32 [num_reqs], the mask and the starts of `AttentionMetadata`; None: no row is a
                node.
        """
        num_tokens, num_reqs, num_sampled = len(step.token_ids), step.num_reqs, len(step.sampled_rows)
        size = self._size(num_tokens)
        assert size is not None
        graph = self._graphs[size]
        padded = self._padding(size)
        padded.token_ids[:num_tokens] = step.token_ids
        padded.token_rows[:num_tokens] = step.token_rows
        padded.positions[:num_tokens] = step.positions
        padded.slot_mappings[:, :num_tokens] = step.slot_mappings
        padded.query_start_loc[: num_reqs + 1] = step.query_start_loc
        padded.query_start_loc[num_reqs + 1 :] = num_tokens
        padded.seq_lens[:num_reqs] = step.seq_lens
        padded.logits_indices[:num_sampled] = step.logits_indices
        padded.sampled_rows[:num_sampled] = step.sampled_rows
        arrays = step_arrays(padded)
        fixed = sum(array.nbytes for array in arrays)
        host = buffers.next(fixed + step.block_tables.nbytes)
        write_parts(host, [*arrays, np.ascontiguousarray(step.block_tables)])
        remote = host.to(self._device, non_blocking=True)
        self._inputs[:fixed].copy_(remote[:fixed])
        entries = remote[fixed:].view(torch.int32).view(step.block_tables.shape)
        self._block_tables[:, :num_reqs, : step.block_tables.shape[2]].copy_(entries)
        fill(graph.tensors.token_ids)
        if self._trees is not None:
            self._trees.put(trees, buffers)
        graph.graph.replay()
        self.left = graph.left
        return DecodeOutput(graph.output.logits[:num_sampled], graph.output.outcomes[:num_sampled])

    def _size(self, num_tokens: int) -> int | None:
        return choose_size(self._sizes, num_tokens, self._decoder.launch_bound)

    def _padding(self, size: int) -> StepInput:
        """A step of `size` padding tokens and no request."""
        reqs, row = self._max_num_reqs, self._padding_row
        return StepInput(
            token_ids=np.full(size, SAMPLED_TOKEN, dtype=np.int64),
            token_rows=np.full(size, row, dtype=np.int64),
            positions=np.zeros(size, dtype=np.int64),
            slot_mappings=np.zeros((self._num_groups, size), dtype=np.int64),
            query_start_loc=np.zeros(reqs + 1, dtype=np.int32),
            seq_lens=np.zeros(reqs, dtype=np.int32),
            block_tables=np.zeros((self._num_groups, reqs, 0), dtype=np.int32),
            num_decodes=0,
            sampled_request_ids=[],
            sampled_reqs=np.zeros(0, dtype=np.int64),
            sampled_rows=np.full(len(self._logits), row, dtype=np.int64),
            logits_indices=np.zeros(len(self._logits), dtype=np.int64),
            sampling=None,
        )

    def _capture(self, size: int, pool: object) -> _Graph:
        padding = self._padding(size)
        arrays = step_arrays(padding)
        host = torch.empty(sum(array.nbytes for array in arrays), dtype=torch.uint8)
        write_parts(host, arrays)
        inputs = self._inputs[: host.numel()]
        inputs.copy_(host)
        tensors = device_views(inputs, padding, self._block_tables)
        if self._trees is not None:
            tensors = replace(tensors, metadata=tensors.metadata.with_trees(*self._trees.of_size(size)))

        def run() -> tuple[DecodeOutput, GraphPass | None]:
            hidden = self._decoder.forward(
                tensors.token_ids,
                tensors.token_rows,
                self._sampled_token_ids,
                self._layer_caches,
                tensors.metadata,
                self._attention,
            )
            left = None
            if self._keep is not None:
                left = GraphPass(self._keep(hidden), tensors.token_rows, tensors.metadata)
            logits = self._decoder.compute_logits(hidden[tensors.logits_indices], output=self._logits)
            chosen, finite = greedy_tokens(logits)
            outcomes = record_tokens(chosen, finite, tensors.sampled_rows, self._sampled_token_ids)
            return DecodeOutput(logits, outcomes), left

        graph, (output, left) = capture_graph(run, pool, self._device)
        return _Graph(graph, tensors, output, left)


class _Trees:
    """Which rows of a step are nodes of trees, where the graphs read it; none until some are put there."""

    def __init__(self, max_num_tokens: int, max_num_reqs: int, device: torch.device) -> None:
        self._mask = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._num_masked = 0

    def of_size(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        return self._mask[:num_tokens], self._starts

    def put(self, trees: tuple[np.ndarray, np.ndarray] | None, buffers: HostBuffers) -> None:
        self._mask[: self._num_masked].fill_(-1)  # of the last step
        self._num_masked = 0
        if trees is None:
            return
        mask, starts = trees
        host = buffers.next(mask.nbytes + starts.nbytes)
        write_parts(host, [mask, starts])
        remote = host.to(self._mask.device, non_blocking=True)
        self._mask[: len(mask)].copy_(remote[: mask.nbytes].view(torch.int64))
        self._starts[: len(starts)].copy_(remote[mask.nbytes :].view(torch.int32))
        self._num_masked = len(mask)
