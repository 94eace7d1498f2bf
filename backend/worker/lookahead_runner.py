"""`LookaheadModelRunner`: a `SpeculativeModelRunner` whose rounds advance windows of guesses beside the drafts they verify."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from backend.core.draft_cost import DraftCost
from backend.spec_decode.lookahead import LookaheadProposer, WindowLayout
from backend.worker.input_batch import StepInput
from backend.worker.lookahead_batch import LookaheadInputBatch
from backend.worker.speculation import Draft
from backend.worker.speculative_batch import Verification
from backend.worker.speculative_runner import SpeculativeModelRunner

# Of a round, in plain steps, where these take less than the host needs for its windows: with SmolLM2-135M on an H200 3.0 ms with
# one request and 3.6 with 16, where a plain step takes 0.45 and 0.58. Of that, what a token, its window and any round take by
# other constants is 2.2 steps.
WINDOW_COST = 4.5
# Of a round in a graph, whose rows of logits all graphs then have; larger ones are launched op by op.
MAX_GRAPH_REQS = 16


class LookaheadModelRunner(SpeculativeModelRunner):
    """Rounds run as mixed steps, whose graphs have a mask for the windows; they do not follow each other without the host."""

    _batch_class = LookaheadInputBatch
    _has_graph_rounds = False
    _has_trees = True

    @property
    def _num_logits(self) -> int:
        assert self._config.scheduler.max_num_seqs is not None
        num_rows = 1 + self._config.speculative.num_speculative_tokens + self.layout.num_columns
        return min(self._config.scheduler.max_num_seqs, MAX_GRAPH_REQS) * num_rows

    @property
    def _graph_bytes(self) -> int:
        return super()._graph_bytes + 4 * self._num_logits * self.loaded.config.vocab_size

    @property
    def layout(self) -> WindowLayout:
        settings = self._config.speculative
        return WindowLayout(settings.lookahead_window, settings.lookahead_ngram)

    @property
    def draft_cost(self) -> float:
        """Of a round, the window's nodes and the host's time for them, shared out among the drafts."""
        assert self._decoder is not None
        cost = self.layout.num_nodes * DraftCost(device=self._device.type).verify(1)
        if self._decoder.launch_bound and not self._config.kernels.enforce_eager:
            cost += WINDOW_COST
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
        indices = np.concatenate((wide.verification.logits_indices, wide.last_row))
        trees = wide.tree_mask, wide.tree_starts
        logits = self._logits_behind(wide.step, indices, draft, wide.verification, trees)
        num_asked = len(logits) - len(wide.last_row)
        guesses, _ = self._sampling_ops.greedy_tokens(logits[num_asked:])
        self._proposer.observe(verification.request_ids, guesses.view(-1, layout.num_columns))
        return logits[:num_asked]
