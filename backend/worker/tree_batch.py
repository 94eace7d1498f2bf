"""Steps whose drafts are trees: `with_trees`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from backend.spec_decode.draft_tree import DraftTree
from backend.worker.input_batch import StepInput
from backend.worker.speculative_batch import Verification


@dataclass(frozen=True, slots=True)
class TreeStep:
    step: StepInput
    tree_mask: np.ndarray  # int64 [num_tokens], as `paged_attention` takes it
    tree_starts: np.ndarray  # int32 [num_reqs]


def with_trees(step: StepInput, verification: Verification, tree: DraftTree) -> TreeStep:
    """What `build_drafted` gave, each row's drafts being the first nodes of a tree. Slots stay: nodes lie side by side."""
    counts = verification.num_draft_tokens + 1
    begins = np.cumsum(counts) - counts
    roots = verification.logits_indices[begins]
    nodes = np.arange(int(counts.sum())) - np.repeat(begins, counts)
    positions = step.positions.copy()
    starts = positions[roots]
    positions[verification.logits_indices] = np.repeat(starts, counts) + np.array(tree.depths)[nodes]
    tree_mask = np.full(len(positions), -1, dtype=np.int64)
    tree_mask[verification.logits_indices] = np.array(tree.masks, dtype=np.int64)[nodes]
    tree_starts = np.zeros(step.num_reqs, dtype=np.int32)
    tree_starts[np.searchsorted(step.query_start_loc, roots, side="right") - 1] = starts
    return TreeStep(replace(step, positions=positions), tree_mask, tree_starts)
