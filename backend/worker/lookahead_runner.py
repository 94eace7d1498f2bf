"""`LookaheadModelRunner`: a `SpeculativeModelRunner` whose rounds advance windows of guesses beside the drafts they verify."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from backend.core.draft_length import DraftCost
from backend.sample.metadata import copy_to
from backend.spec_decode.lookahead import LookaheadProposer, WindowLayout
from backend.worker.input_batch import StepInput
from backend.worker.lookahead_batch import LookaheadInputBatch
from backend.worker.speculation import Draft
from backend.worker.speculative_batch import Verification
from backend.worker.speculative_runner import SpeculativeModelRunner
from backend.worker.step_tensors import to_device

# How much longer a step takes op by op than in a graph, in steps, where launching takes longer than computing: of a model of 135
# million parameters several ms instead of 0.4.
LAUNCH_COST = 5.0


class LookaheadModelRunner(SpeculativeModelRunner):
    """Rounds are launched op by op: no graph has their mask. Plain steps and prompts have their graphs as ever."""

    _batch_class = LookaheadInputBatch
    _has_graph_rounds = False

    @property
    def layout(self) -> WindowLayout:
        settings = self._config.speculative
        return WindowLayout(settings.lookahead_window, settings.lookahead_ngram)

    @property
    def draft_cost(self) -> float:
        """Of a round, the window's nodes and what it takes longer than in a graph; shared out among the drafts."""
        assert self._decoder is not None
        cost = self.layout.num_nodes * DraftCost(device=self._device.type).verify(1)
        if self._decoder.launch_bound and not self._config.kernels.enforce_eager:
            cost += LAUNCH_COST
        return cost / self._config.speculative.num_speculative_tokens

    def notices(self, max_model_len: int) -> tuple[str, ...]:
        num_tokens, budget = 2 + self.layout.num_nodes, self._config.scheduler.max_num_batched_tokens
        assert budget is not None
        last = num_tokens - 1
        notices = [
            f"speculation turns off for the last {last:,} tokens of the context, once a request has more than "
            f"{max(0, max_model_len - last):,} of its {max_model_len:,}: a window of guesses has no room there."
        ]
        if budget < num_tokens:
            notices = [
                f"speculation is off: a step with a window has {num_tokens:,} tokens at least, and "
                f"scheduler.max_num_batched_tokens is {budget:,}."
            ]
        elif not self._config.kernels.enforce_eager:
            notices.append("rounds of speculation run without CUDA graphs: those have no mask for a window of guesses.")
        return (*super().notices(max_model_len), *notices)

    def _make_proposer(self) -> LookaheadProposer:
        self._proposer = LookaheadProposer(self.layout, self._device)
        return self._proposer

    def _run_drafted(self, step: StepInput, draft: Draft, verification: Verification) -> Tensor:
        batch, layout, speculation = self._batch, self.layout, self._speculation
        assert isinstance(batch, LookaheadInputBatch)
        assert speculation is not None
        windows = self._proposer.windows(verification.request_ids)
        wide = batch.with_windows(step, verification, windows, layout)
        tensors = to_device(wide.step, self._uploads, self._device)
        speculation.put_drafts(tensors.token_ids, draft, wide.verification)
        trees = copy_to(wide.tree_mask, self._device), copy_to(wide.tree_starts, self._device)
        tensors = replace(tensors, metadata=tensors.metadata.with_trees(*trees))
        indices = np.concatenate((wide.step.logits_indices, wide.verification.logits_indices, wide.last_row))
        logits = self._logits(self._hidden(tensors)[copy_to(indices, self._device)])
        num_asked = len(indices) - len(wide.last_row)
        guesses, _ = self._sampling_ops.greedy_tokens(logits[num_asked:])
        self._proposer.observe(verification.request_ids, guesses.view(-1, layout.num_columns))
        return logits[:num_asked]
