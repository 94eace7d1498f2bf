"""`RoundTexts`: the requests' texts on the device, where the graphs of rounds look their drafts up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.core.output import ModelRunnerOutput, PendingOutput
from backend.core.speculation import LOOK_UP_METHODS
from backend.spec_decode.proposer import DraftRequest, Text, TextProposer
from backend.worker.round_tensors import RoundRows
from backend.worker.step_tensors import HostBuffers, write_parts

# An implementation of `ngram_drafts`.
NgramDrafts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int], None]


def has_texts(config: EngineConfig) -> bool:
    """Whether graphs of rounds look drafts up: where steps wait for the host anyway, it does so."""
    return config.speculative.method in LOOK_UP_METHODS and bool(config.scheduler.async_scheduling)


def text_bytes(config: EngineConfig) -> int:
    """Device memory of the texts, their lengths included."""
    max_num_seqs, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
    assert max_num_seqs is not None
    assert max_model_len is not None
    return (max_num_seqs + 1) * (4 * max_model_len + 8) if has_texts(config) else 0


class RoundTexts:
    """A text for each row of the batch. What rounds in graphs bring is appended on the device; the host sends all the rest, but
    not before a round.

    Args:
        proposer: knows the texts on the host, and drafts from them what is not drafted here.
        ngram_drafts: the op.
        lengths: shortest and longest end of a text that is looked up, in tokens.
        shape: rows of the batch's persistent arrays, the padding's included; and tokens of the longest request.
    """

    def __init__(
        self,
        proposer: TextProposer,
        ngram_drafts: NgramDrafts,
        lengths: tuple[int, int],
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._proposer = proposer
        self._ngram_drafts = ngram_drafts
        self._n_min, self._n_max = lengths
        self._device = device
        self._texts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(shape[0], dtype=torch.int64, device=device)
        # Of which text a row holds how many tokens. Who comes, or comes back, has another text, if it has the same tokens.
        self._held: list[tuple[Text, int]] = [((), 0)] * shape[0]

    def upload(self, requests: Sequence[DraftRequest], buffers: HostBuffers) -> None:
        """Send what the device does not have of these texts; the results of all rounds of these requests are known."""
        missing, rows, ends = [], [], []
        for request in requests:
            row, text = request.row, self._proposer.text(request.request_id)
            held, num_held = self._held[row]
            num_held = num_held if held is text else 0
            if num_held < len(text):
                missing.append((row, num_held, text[num_held:]))
                rows.append(row)
                ends.append(len(text))
                self._held[row] = (text, len(text))
        if not missing:
            return
        width = self._texts.shape[1]
        places = np.concatenate([row * width + begin + np.arange(len(tokens)) for row, begin, tokens in missing])
        token_ids = np.concatenate([np.array(tokens, dtype=np.int32) for _, _, tokens in missing])
        host = buffers.next(12 * len(places) + 16 * len(rows))
        write_parts(host, [places, np.array([rows, ends], dtype=np.int64), token_ids])
        remote = host.to(self._device, non_blocking=True)
        numbers = remote[: 8 * (len(places) + 2 * len(rows))].view(torch.int64)
        self._texts.view(-1).index_copy_(0, numbers[: len(places)], remote[8 * len(numbers) :].view(torch.int32))
        self._lengths.index_copy_(0, *numbers[len(places) :].view(2, -1))

    def draft(self, ids: Tensor, rows: RoundRows) -> None:
        """Append what came of a round and look up the next drafts, in place of those of `rows`. Reads nothing of the host's.

        Args:
            ids: int64 [size, 2 * k + 3], see `verify_chain`.
        """
        self._ngram_drafts(
            ids,
            rows.rows,
            rows.num_granted,
            self._texts,
            self._lengths,
            rows.drafts,
            rows.counts,
            self._n_min,
            self._n_max,
        )

    def follow(self, pending: PendingOutput, rows: Mapping[str, int]) -> PendingOutput:
        """The same result of a round, whose tokens the device has appended to these requests' texts by itself."""
        return _Followed(pending, self, rows)

    def appended(self, row: int, num_tokens: int) -> None:
        """So many tokens more are there."""
        text, num_held = self._held[row]
        self._held[row] = (text, num_held + num_tokens)


@dataclass(frozen=True, slots=True)
class _Followed:
    pending: PendingOutput
    texts: RoundTexts
    rows: Mapping[str, int]

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        for request_id, row in self.rows.items():
            if request_id in output.sampled_token_ids:
                self.texts.appended(row, len(output.sampled_token_ids[request_id]))
        return output
