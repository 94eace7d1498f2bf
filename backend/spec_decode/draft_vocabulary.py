"""The tokens a head can draft, and a batch's drafts as they are chosen among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backend.layers.linear import Linear
from backend.layers.ops import library_linear
from backend.spec_decode.draft_sampling import DraftSampling
from backend.spec_decode.proposer import DraftOutput, DraftRequest
from kernels.reference.greedy_tokens import greedy_tokens


class DraftVocabulary:
    """Args:
    token_ids: int64 [draft_vocab], ascending.
    rows: [draft_vocab, hidden], of the target's output head.
    vocab_size: the target's.
    choose: one of `SamplerOps.greedy_tokens`.
    linear: one of `LayerOps.linear`.
    """

    def __init__(
        self,
        token_ids: Tensor,
        rows: Tensor,
        vocab_size: int,
        choose: Callable[..., tuple[Tensor, Tensor]] = greedy_tokens,
        linear: Callable[[Linear, Tensor, torch.dtype | None], Tensor] = library_linear,
    ) -> None:
        self.token_ids = token_ids
        self._choose = choose
        self._linear = linear
        self.vocab_size = vocab_size
        self.num_parameters = rows.numel()
        size, hidden_size = rows.shape
        self._output = Linear(hidden_size, size, bias=False, dtype=rows.dtype, device=torch.device("meta"))
        self._output.weight = nn.Parameter(rows, requires_grad=False)
        self._output.prepare()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, draft_vocab] of what the target's output head would take, float [num_rows, hidden]."""
        return self._linear(self._output, hidden, torch.float32)

    def likeliest(self, logits: Tensor) -> Tensor:
        """The target's id of each row's largest logit, int64 [num_rows]."""
        return self._choose(logits, self.token_ids)[0]


class DraftsInProgress:
    """Greedy requests get the likeliest token of those that can be drafted, others a draw from the filtered distribution.

    Args:
        counts: tokens that are drafted for each request.
    """

    def __init__(self, requests: Sequence[DraftRequest], counts: list[int], vocabulary: DraftVocabulary) -> None:
        self.counts = counts
        self._vocabulary = vocabulary
        device, k = vocabulary.token_ids.device, max(counts)
        self._token_ids = torch.zeros(len(requests), k, dtype=torch.int64, device=device)
        self._sampling = DraftSampling.of(requests, k, device) if k else None
        self._probs: Tensor | None = None  # float32 [num_reqs, k, vocab_size]
        if self._sampling is not None:
            self._probs = torch.zeros(len(requests), k, vocabulary.vocab_size, device=device)

    def choose(self, logits: Tensor, places: Tensor, index: int) -> Tensor:
        """The token at a place of some drafts.

        Args:
            logits: float32 [num_rows, draft_vocab].
            places: int64 [num_rows], the requests that these are.
        Returns:
            int64 [num_rows].
        """
        vocabulary = self._vocabulary
        if self._sampling is None or self._probs is None:
            token_ids = vocabulary.likeliest(logits)
        else:
            drawn, probs = self._sampling.draw(logits, places, index)
            self._probs[places[:, None], index, vocabulary.token_ids] = probs
            token_ids = vocabulary.token_ids[drawn]
        self._token_ids[places, index] = token_ids
        return token_ids

    def output(self) -> DraftOutput:
        return DraftOutput(self._token_ids, self.counts, self._probs)
