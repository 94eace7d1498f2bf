"""`LookaheadInputBatch`: a `SpeculativeInputBatch` whose rounds run windows of guesses behind their drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from backend.spec_decode.lookahead import WindowLayout
from backend.worker.input_batch import StepInput
from backend.worker.speculative_batch import SpeculativeInputBatch, Verification


@dataclass(frozen=True, slots=True)
class WindowStep:
    """A step with drafts, and windows behind them. Requests with a window are trees from their last token on."""

    step: StepInput
    verification: Verification
    tree_mask: np.ndarray  # int64 [num_tokens], as `paged_attention` takes it
    tree_starts: np.ndarray  # int32 [num_reqs]
    last_row: (
        np.ndarray
    )  # int64 [num_rows * num_columns], places of the windows' last rows, in the verification's order


class LookaheadInputBatch(SpeculativeInputBatch):
    def with_windows(
        self, step: StepInput, verification: Verification, windows: np.ndarray, layout: WindowLayout
    ) -> WindowStep:
        """What `build_drafted` gave, with a window behind the drafts of each row of the verification.

        Args:
            windows: int64 [num_rows, num_nodes].
        """
        num_nodes, block_size = layout.num_nodes, self._block_size
        start_loc = step.query_start_loc.astype(np.int64)
        rows = step.token_rows[start_loc[:-1]]  # of each request
        places = {row: place for place, row in enumerate(verification.rows.tolist())}
        chosen = np.array(
            [places.get(row, -1) for row in rows.tolist()]
        )  # of each request, its row of the verification
        has_window = chosen >= 0
        num_added = np.where(has_window, num_nodes, 0)
        before = np.concatenate(([0], np.cumsum(num_added)))

        ends = np.repeat(start_loc[1:], num_added)  # where the added tokens come in
        added_rows = np.repeat(rows, num_added)
        lens = step.seq_lens.astype(np.int64)
        slots = (lens[has_window, None] + np.arange(num_nodes)).ravel()
        num_drafts = verification.num_draft_tokens[chosen[has_window]]
        begins = lens[has_window] - num_drafts - 1  # the places of the last tokens
        positions = (begins[:, None] + layout.depths).ravel()
        blocks = self._entries(added_rows, slots // block_size).astype(np.int64)
        seq_lens = lens + num_added

        def moved(indices: np.ndarray) -> np.ndarray:
            """The places of tokens of the step as it was."""
            return indices + before[np.searchsorted(start_loc, indices, side="right") - 1]

        tree_mask = np.full(len(step.token_ids) + len(slots), -1, dtype=np.int64)
        tree_starts = np.zeros(len(rows), dtype=np.int32)
        tree_starts[has_window] = begins
        first_tokens = start_loc[:-1] + before[:-1]
        last_row = np.zeros((len(verification.rows), layout.num_columns), dtype=np.int64)
        for request, count in zip(np.flatnonzero(has_window).tolist(), num_drafts.tolist(), strict=True):
            end = first_tokens[request] + 1 + count + num_nodes
            tree_mask[first_tokens[request] : end] = layout.tree_bits(count)
            last_row[chosen[request]] = np.arange(end - layout.num_columns, end)
        return WindowStep(
            step=replace(
                step,
                token_ids=np.insert(step.token_ids, ends, windows[chosen[has_window]].ravel()),
                token_rows=np.insert(step.token_rows, ends, added_rows),
                positions=np.insert(step.positions, ends, positions),
                slot_mappings=np.insert(step.slot_mappings, ends, blocks * block_size + slots % block_size, axis=1),
                query_start_loc=(start_loc + before).astype(np.int32),
                seq_lens=seq_lens.astype(np.int32),
                block_tables=self._entries(rows, slice(-(-int(seq_lens.max()) // block_size))),
                logits_indices=moved(step.logits_indices),
            ),
            verification=replace(
                verification,
                draft_indices=moved(verification.draft_indices),
                logits_indices=moved(verification.logits_indices),
            ),
            tree_mask=tree_mask,
            tree_starts=tree_starts,
            last_row=last_row.ravel(),
        )
