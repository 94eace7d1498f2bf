"""The draws of decode steps as CUDA graphs, one for each size: launched one by one they take as long as a small model's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.sample.columns import SamplingColumns
from backend.sampling_params import SamplingParams
from backend.worker.decode_graphs import capture_graph
from backend.worker.step_tensors import HostBuffers
from kernels.ops.next_draws import next_draws
from kernels.ops.record_tokens import record_tokens
from kernels.ops.sample_tokens import sample_tokens

_NUM_BYTES = 2 * 8 + 3 * 4  # of a row: seed and position, temperature, top-p and top-k


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    outcomes: Tensor  # int64 [size]
    rows: Tensor  # kept because a replay reads it


class DrawGraphs:
    """How rows are sampled is uploaded once; each draw then moves them one position on, as long as the batch stays.

    Args:
    logits: float32 [max_size, vocab_size], where the steps' graphs leave theirs.
    sampled_token_ids: int64, the last token of each row; the last row is the padding's.
    """

    def __init__(self, logits: Tensor, sampled_token_ids: Tensor) -> None:
        self._logits = logits
        self._sampled_token_ids = sampled_token_ids
        self._graphs: dict[int, _Graph] = {}
        max_size = len(logits)
        self._inputs = torch.zeros(_NUM_BYTES * max_size, dtype=torch.uint8, device=logits.device)
        wide, narrow = self._inputs.split((16 * max_size, 12 * max_size))
        self._seeds, self._positions = wide.view(torch.int64).view(2, max_size)
        self._temperature, self._top_p, top_k = narrow.view(torch.float32).view(3, max_size)
        self._top_k = top_k.view(torch.int32)

    def capture(self, rows: Tensor, pool: object) -> None:
        """The graph for as many requests as there are rows.

        Args:
            rows: int64 [size], of each request, as `record_tokens` takes them; read anew by each replay.
        """
        size = len(rows)

        def run() -> Tensor:
            draws = next_draws(self._seeds[:size], self._positions[:size])
            parameters = (self._temperature[:size], self._top_k[:size], self._top_p[:size])
            chosen, finite = sample_tokens(self._logits[:size], *parameters, draws)
            return record_tokens(chosen, finite, rows, self._sampled_token_ids)

        graph, outcomes = capture_graph(run, pool, self._logits.device)
        self._graphs[size] = _Graph(graph, outcomes, rows)

    def start(self, params: Sequence[SamplingParams], positions: Sequence[int], buffers: HostBuffers) -> None:
        """Upload how the requests of a batch are sampled; padding, as if it were greedy.

        Args:
            positions: of the output token that each draws next.
        """
        columns, num_reqs, max_size = SamplingColumns.of(params), len(params), len(self._logits)
        host = buffers.next(_NUM_BYTES * max_size)
        values = host.numpy()
        values[:] = 0
        wide = values[: 16 * max_size].view(np.int64).reshape(2, max_size)
        wide[0, :num_reqs] = columns.seeds.view(np.int64)
        wide[1, :num_reqs] = positions
        values[16 * max_size :].view(np.int32).reshape(3, max_size)[:, :num_reqs] = columns.words()
        self._inputs.copy_(host, non_blocking=True)

    def replay(self, size: int, num_reqs: int) -> Tensor:
        """What becomes of each request, int64 [num_reqs]: its token, or -1 where its logits are not finite.

        Args:
            size: of the step's graph.
        """
        graph = self._graphs[size]
        graph.graph.replay()
        return graph.outcomes[:num_reqs]
