"""The draws of decode steps as CUDA graphs, one for each size: launched one by one they take as long as a small model's step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.sample.metadata import SamplingTensors
from backend.worker.decode_graphs import capture_graph
from kernels.ops.record_tokens import record_tokens
from kernels.ops.sample_tokens import sample_tokens


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    outcomes: Tensor  # int64 [size]
    rows: Tensor  # kept because a replay reads it


class DrawGraphs:
    """Args:
    logits: float32 [max_size, vocab_size], where the steps' graphs leave theirs.
    sampled_token_ids: int64, the last token of each row; the last row is the padding's.
    """

    def __init__(self, logits: Tensor, sampled_token_ids: Tensor) -> None:
        self._logits = logits
        self._sampled_token_ids = sampled_token_ids
        self._graphs: dict[int, _Graph] = {}
        max_size, device = len(logits), logits.device
        # Padding draws as well, for the padding's row.
        self._tensors = SamplingTensors(
            temperature=torch.ones(max_size, device=device),
            top_k=torch.zeros(max_size, dtype=torch.int32, device=device),
            top_p=torch.ones(max_size, device=device),
            draws=torch.zeros(max_size, dtype=torch.float64, device=device),
        )
        self._last: SamplingTensors | None = None

    def capture(self, rows: Tensor, pool: object) -> None:
        """The graph for as many requests as there are rows.

        Args:
            rows: int64 [size], of each request, as `record_tokens` takes them; read anew by each replay.
        """
        size, tensors = len(rows), self._tensors

        def run() -> Tensor:
            given = (tensors.temperature, tensors.top_k, tensors.top_p, tensors.draws)
            chosen, finite = sample_tokens(self._logits[:size], *(tensor[:size] for tensor in given))
            return record_tokens(chosen, finite, rows, self._sampled_token_ids)

        graph, outcomes = capture_graph(run, pool, self._logits.device)
        self._graphs[size] = _Graph(graph, outcomes, rows)

    def replay(self, size: int, tensors: SamplingTensors) -> Tensor:
        """What becomes of each request, int64 [num_reqs]: its token, or -1 where its logits are not finite.

        Args:
            tensors: of as many requests as there are, at most `size`.
        """
        num_reqs, own, last = len(tensors.draws), self._tensors, self._last
        if last is None or tensors.temperature is not last.temperature:  # steps that were built together share them
            own.temperature[:num_reqs].copy_(tensors.temperature)
            own.top_k[:num_reqs].copy_(tensors.top_k)
            own.top_p[:num_reqs].copy_(tensors.top_p)
        own.draws[:num_reqs].copy_(tensors.draws)
        self._last = tensors
        graph = self._graphs[size]
        graph.graph.replay()
        return graph.outcomes[:num_reqs]
