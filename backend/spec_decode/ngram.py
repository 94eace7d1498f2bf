"""`NgramProposer`: what followed the last time the end of the text occurred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from backend.spec_decode.proposer import DraftOutput, DraftRequest


class NgramText:
    """A text, of which it can be asked what followed its end when that occurred before.

    Nothing is kept beside the tokens: an index would have to grow with each of them, and most are never asked about. A scan of
    32,000 tokens takes some 20 us.

    Args:
        n_min, n_max: shortest and longest end that is looked for, in tokens.
    """

    def __init__(self, token_ids: Sequence[int], n_min: int, n_max: int) -> None:
        self._tokens = np.array(token_ids, dtype=np.int32)
        self._num_tokens = len(token_ids)
        self._lengths = (n_min, n_max)

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, where: slice) -> np.ndarray:
        """int32 [num_tokens], a view."""
        return self._tokens[: self._num_tokens][where]

    def extend(self, token_ids: Sequence[int]) -> None:
        begin, self._num_tokens = self._num_tokens, self._num_tokens + len(token_ids)
        if self._num_tokens > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[:begin], np.empty(self._num_tokens + 64, dtype=np.int32)))
        self._tokens[begin : self._num_tokens] = token_ids

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the longest end of the text that has occurred before, the last time it did; nothing if none has.

        A text that repeats itself is taken to go on so: the continuation may run into itself.
        """
        n_min, n_max = self._lengths
        tokens, last, begin = self[:], self._num_tokens - 1, None
        if last < 1:
            return []
        places = np.flatnonzero(tokens[:last] == tokens[last])  # of the last token, so far
        for back in range(min(n_max, last)):
            if back:
                places = places[np.searchsorted(places, back) :]
                places = places[tokens[places - back] == tokens[last - back]]
            if not len(places):
                break
            if back + 1 >= n_min:
                begin = int(places[-1]) + 1
        if begin is None:
            return []
        found = tokens[begin : begin + num_tokens].tolist()
        return [found[index % len(found)] for index in range(num_tokens)]


class NgramProposer:
    """Prompt lookup (Saxena 2023, "Prompt lookup decoding"; the `ngram` of vLLM): no model, and so good where text is copied.

    Looks over prompt and output, for the longest end of the text first.

    Args:
        n_min, n_max: shortest and longest end that is looked up, in tokens.
    """

    def __init__(self, n_min: int, n_max: int) -> None:
        self._lengths = (n_min, n_max)
        self._texts: dict[str, NgramText] = {}

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._texts[request_id] = NgramText(token_ids, *self._lengths)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id].extend(token_ids)

    def text(self, request_id: str) -> NgramText:
        """See `TextProposer`."""
        return self._texts[request_id]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """There is nothing to compute."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        drafts = [self._texts[request.request_id].continuation(request.max_tokens) for request in requests]
        k = max(map(len, drafts))
        padded = torch.tensor([draft + [0] * (k - len(draft)) for draft in drafts], dtype=torch.int64)
        return DraftOutput(padded.view(len(drafts), k), [len(draft) for draft in drafts])
