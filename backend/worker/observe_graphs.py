"""A draft head's reading of steps that ran in graphs, in graphs of its own: `ObserveGraphs`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from backend.spec_decode.proposer import HeadProposer, TargetStep
from backend.worker.decode_graphs import capture_graph
from backend.worker.graph_pass import GraphPass
from backend.worker.step_tensors import HostBuffers, write_parts


class ObserveGraphs:
    """One for each graph of a step, behind which it is replayed: between the two a step's tokens may still be sampled.

    Args:
        passes: gives what those graphs leave, once they are captured.
        num_passes: how many that will be.
        last_token_ids: int64, of each row of the batch; the last row is the padding's.
        max_num_tokens: of the largest of those graphs.
        max_num_reqs: most requests of a step.
    """

    def __init__(
        self,
        head: HeadProposer,
        passes: Callable[[], list[GraphPass]],
        num_passes: int,
        last_token_ids: Tensor,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
    ) -> None:
        self._head = head
        self._passes = passes
        self._num_passes = num_passes
        self._last_token_ids = last_token_ids
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        device = last_token_ids.device
        # Graphs never run at the same time: they share what they read.
        self._inputs = torch.zeros(2 * max_num_reqs + max_num_tokens, dtype=torch.int64, device=device)
        self._rows, self._last_indices, self._next_token_ids = self._inputs.split(
            (max_num_reqs, max_num_reqs, max_num_tokens)
        )

    def __len__(self) -> int:
        return self._num_passes

    @torch.inference_mode()
    def capture(self, pool: object, on_progress: Callable[[], None]) -> None:
        for left in self._passes():
            self._graphs[id(left)] = self._capture(left, pool)
            on_progress()

    def start(
        self,
        left: GraphPass,
        rows: np.ndarray,
        last_indices: np.ndarray,
        next_token_ids: np.ndarray,
        buffers: HostBuffers,
    ) -> tuple[Tensor, Tensor]:
        """Upload what is to be read of the pass that has just been replayed.

        Args:
            rows: int64 [num_reqs].
            last_indices: int64 [num_reqs], of each request's last token in the step.
            next_token_ids: int64 [num_tokens], as `SpeculativeInputBatch.next_token_ids` gives them.
        Returns:
            the last two on the device, where they may be changed before `replay`.
        """
        num_reqs, num_tokens, max_num_reqs = len(rows), len(next_token_ids), len(self._rows)
        padded = np.zeros(2 * max_num_reqs + len(left.rows), dtype=np.int64)
        padded[:max_num_reqs] = len(self._last_token_ids) - 1
        padded[:num_reqs] = rows
        padded[max_num_reqs:][:num_reqs] = last_indices
        padded[2 * max_num_reqs :][:num_tokens] = next_token_ids
        host = buffers.next(padded.nbytes)
        write_parts(host, [padded])
        self._inputs[: len(padded)].copy_(host.view(torch.int64), non_blocking=True)
        return self._last_indices[:num_reqs], self._next_token_ids[:num_tokens]

    def replay(self, left: GraphPass) -> None:
        self._graphs[id(left)].replay()

    def _capture(self, left: GraphPass, pool: object) -> torch.cuda.CUDAGraph:
        num_tokens = len(left.rows)
        self._clear(left)
        self._rows.fill_(len(self._last_token_ids) - 1)
        self._last_indices.zero_()
        self._next_token_ids.zero_()

        def run() -> None:
            following = self._next_token_ids[:num_tokens]
            following = following.where(following >= 0, self._last_token_ids.index_select(0, left.rows)).clamp(min=0)
            self._head.read(TargetStep(left.states, following, left.metadata, self._rows, self._last_indices))

        return capture_graph(run, pool, self._last_token_ids.device)[0]

    def _clear(self, left: GraphPass) -> None:
        """Nothing but padding: its graph has not run yet, and inputs are shared with graphs that lay them out otherwise."""
        left.states.zero_()
        left.rows.fill_(len(self._last_token_ids) - 1)
        for metadata in (left.metadata, *left.metadata.other_groups):
            for tensor in (metadata.positions, metadata.slot_mapping, metadata.seq_lens):
                tensor.zero_()
        if not left.metadata.num_decodes:  # else it never changes
            left.metadata.query_start_loc.zero_()
