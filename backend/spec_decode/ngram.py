"""`NgramProposer`: what followed the last time the end of the text occurred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from backend.spec_decode.proposer import DraftOutput, DraftRequest


class NgramIndex:
    """The tokens of one text, and where each of its n-grams was last followed by another token.

    Attributes:
        token_ids: the text.

    Args:
        n_min, n_max: lengths of n-grams that are kept.
    """

    def __init__(self, token_ids: Iterable[int], n_min: int, n_max: int) -> None:
        self.token_ids: list[int] = []
        self._followers: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in range(n_max, n_min - 1, -1)]
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens = self.token_ids
        for token_id in token_ids:
            end = len(tokens)
            for n, follower in self._followers:
                if n <= end:
                    follower[tuple(tokens[end - n :])] = end
            tokens.append(token_id)

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the longest end of the text that has occurred before, the last time it did; nothing if none has.

        A text that repeats itself is taken to go on so: the continuation may run into itself.
        """
        tokens = self.token_ids
        for n, follower in self._followers:
            begin = follower.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if begin is not None:
                found = tokens[begin : begin + num_tokens]
                period = len(found)
                return [found[index % period] for index in range(num_tokens)]
        return []


class NgramProposer:
    """Prompt lookup (Saxena 2023, "Prompt lookup decoding"; the `ngram` of vLLM): no model, and so good where text is copied.

    Looks over prompt and output, for the longest end of the text first. Each token costs a look-up or two when it comes, and a
    draft as many: a long text is never searched.

    Args:
        n_min, n_max: shortest and longest end that is looked up, in tokens.
    """

    def __init__(self, n_min: int, n_max: int) -> None:
        self._lengths = (n_min, n_max)
        self._texts: dict[str, NgramIndex] = {}

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._texts[request_id] = NgramIndex(token_ids, *self._lengths)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id].extend(token_ids)

    def text(self, request_id: str) -> Sequence[int]:
        """See `TextProposer`."""
        return self._texts[request_id].token_ids

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """There is nothing to compute."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        drafts = [self._texts[request.request_id].continuation(request.max_tokens) for request in requests]
        k = max(map(len, drafts))
        padded = torch.tensor([draft + [0] * (k - len(draft)) for draft in drafts], dtype=torch.int64)
        return DraftOutput(padded.view(len(drafts), k), [len(draft) for draft in drafts])
