"""`TreeModelRunner`: a `HeadModelRunner` whose drafts are trees."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from backend.attention.compaction import KVCompaction
from backend.core.output import PendingOutput
from backend.core.speculative_scheduler import MAX_TREE_REQS
from backend.sample.metadata import copy_to
from backend.spec_decode.draft_tree import DraftTree
from backend.spec_decode.draft_vocabulary import DraftVocabulary
from backend.spec_decode.eagle import EagleDraft
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.tree_drafting import TopTokens, TreeLayout
from backend.spec_decode.tree_proposers import EagleTreeProposer, MedusaTreeProposer
from backend.worker.head_runner import HeadModelRunner
from backend.worker.input_batch import StepInput
from backend.worker.speculation import Draft
from backend.worker.speculative_batch import SpeculativeInputBatch, Verification
from backend.worker.step_tensors import to_device
from backend.worker.tree_batch import with_trees
from backend.worker.tree_rounds import PathDownload, TreeRounds

if TYPE_CHECKING:
    from backend.worker.graph_rounds import GraphRounds
    from backend.worker.graphs import GraphSet
    from backend.worker.round_graphs import RoundParts


class TreeModelRunner(HeadModelRunner):
    """A round verifies all nodes in one pass, and moves the keys and values of the accepted ones to the slots behind the text.

    Greedy rounds of few requests run in graphs, all others op by op.
    """

    def _let_go(self) -> None:
        super()._let_go()
        self._tree_rounds: TreeRounds | None = None
        self._compact: KVCompaction | None = None

    @cached_property
    def tree(self) -> DraftTree:
        """Of every draft, no deeper than the head can draft. To be asked when that is loaded."""
        tree = self._config.speculative.draft_tree
        assert tree is not None
        return tree.cut(self._max_num_drafts)

    def notices(self, max_model_len: int) -> tuple[str, ...]:
        notices = [f"drafts are trees of {self.tree.num_drafted} tokens, {self.tree.depth} of them in a row at most."]
        speculative, most = self._config.speculative, self._config.scheduler.max_num_seqs
        if not self._config.kernels.enforce_eager and most is not None and most > MAX_TREE_REQS:
            effect = "off" if speculative.adaptive else "without CUDA graphs"
            notices.append(f"speculation is {effect} in steps in which more than {MAX_TREE_REQS} requests decode.")
        return (*super().notices(max_model_len), *notices)

    @property
    def _num_logits(self) -> int:
        from backend.worker.tree_graphs import tree_round_rows  # needs triton, which a CPU does without

        assert self._config.scheduler.max_num_seqs is not None
        return tree_round_rows(self._config.scheduler.max_num_seqs, self.tree)

    def _make_rounds(self, parts: RoundParts, **sizes: int) -> tuple[GraphRounds, GraphSet]:
        from backend.worker.tree_graphs import TreeGraphRounds, TreeGraphs, TreeParts

        proposer = self._proposer
        assert isinstance(proposer, EagleTreeProposer | MedusaTreeProposer)
        assert self._compact is not None
        if self._config.kernels.backend == "triton":
            from kernels.ops.verify_tree import verify_tree  # needs triton, which a CPU does without
        else:
            from kernels.reference.verify_tree import verify_tree
        graphs = TreeGraphs(parts, TreeParts(self.tree, proposer, verify_tree, self._compact), **sizes)
        return TreeGraphRounds(graphs, *self._round_parts(parts)), graphs

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        super().initialize_kv_cache(num_blocks, max_model_len)
        on_triton = self._config.kernels.backend == "triton"
        self._tree_rounds = TreeRounds(self.tree, self._device, self._sampling_ops if on_triton else None)
        self._compact = KVCompaction(self._all_caches, use_kernel=on_triton)

    def _propose_by_medusa(
        self, heads: MedusaHeads, vocabulary: DraftVocabulary, embedding: Tensor, states: Tensor
    ) -> MedusaTreeProposer:
        assert self._decoder is not None
        layout = TreeLayout.of(self.tree, self._device)
        final_hidden = self._decoder.final_hidden
        return MedusaTreeProposer(heads, vocabulary, final_hidden, embedding, states, layout, self._top_tokens)

    def _propose_by_eagle(self, draft: EagleDraft, batch: SpeculativeInputBatch, states: Tensor) -> EagleTreeProposer:
        layout, block_size = TreeLayout.of(self.tree, self._device), self._config.cache.block_size
        last = batch.max_model_len - 1
        return EagleTreeProposer(draft, batch, states, layout, block_size, last, self._top_tokens)

    @property
    def _top_tokens(self) -> TopTokens:
        if self._config.kernels.backend == "triton":
            from kernels.ops.top_tokens import top_tokens  # needs triton, which a CPU does without
        else:
            from kernels.reference.top_tokens import top_tokens
        return top_tokens

    def _run_drafted(self, step: StepInput, draft: Draft, verification: Verification) -> Tensor:
        assert self._speculation is not None
        trees = with_trees(step, verification, self.tree)
        indices = np.concatenate((step.logits_indices, verification.logits_indices))
        tensors = to_device(replace(trees.step, logits_indices=indices), self._uploads, self._device)
        self._speculation.put_drafts(tensors.token_ids, draft, verification)
        masks = copy_to(trees.tree_mask, self._device), copy_to(trees.tree_starts, self._device)
        tensors = replace(tensors, metadata=tensors.metadata.with_trees(*masks))
        return self._logits(self._hidden(tensors)[tensors.logits_indices])

    def _end_round(
        self, step: StepInput, draft: Draft, verification: Verification, logits: Tensor, others: PendingOutput
    ) -> PendingOutput:
        rounds, left = self._tree_rounds, self._last_pass
        assert rounds is not None
        assert left is not None
        assert self._compact is not None
        verified = rounds.verify(logits, draft, verification)
        there = copy_to(verification.num_draft_tokens, self._device)
        chain, path = rounds.as_chain(verified, draft.output.token_ids, there)
        download = PathDownload(self._download(draft, verification, chain, path, others))
        self._verified(step, verification, rounds.followers(verified))
        counts = verification.num_draft_tokens + 1
        roots = verification.logits_indices[np.cumsum(counts) - counts]
        self._compact(left.metadata, copy_to(roots, self._device), verified.accepted_nodes)
        return download
