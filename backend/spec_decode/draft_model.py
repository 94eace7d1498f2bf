"""`DraftModelProposer`: a smaller model drafts token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.core.block_pool import NULL_BLOCK
from backend.sample.metadata import copy_to
from backend.spec_decode.draft_sampling import DraftSampling
from backend.spec_decode.proposer import DraftChain, DraftOutput, DraftRequest
from backend.spec_decode.spans import Spans
from backend.worker.decoders import StepDecoder
from backend.worker.step_tensors import HostBuffers, to_device
from kernels.reference.greedy_tokens import greedy_tokens


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts, and where its keys and values are.

    Its layers have slots in the target's blocks: a block's copy, its way to host memory and back, and what the prefix cache
    finds in it hold for them too.
    """

    decoder: StepDecoder
    attention: AttentionBackend
    layer_caches: list[LayerCache]
    vocab_size: int
    max_position_embeddings: int
    last_tokens: Tensor  # int64 [num_rows], as the target's decoder takes it
    shares_cache: bool  # its layers are the target's first ones, which compute their keys and values anyway


class DraftModelProposer:
    """The draft of a request with a temperature is drawn from the draft's own distribution, after the request's filters.

    Greedy requests are drafted for greedily. A draft ends where the draft model's context does. What the model lacks of a
    request, because it was not asked to draft for some steps, it computes when it is asked again.

    Args:
        spans: where the requests' tokens have their slots.
        vocab_size: of the target; more or fewer rows of the draft's head are padding.
        max_num_tokens: most tokens of one pass.
        choose: one of `SamplerOps.greedy_tokens`.
    """

    def __init__(
        self,
        draft: DraftModel,
        spans: Spans,
        vocab_size: int,
        max_num_tokens: int,
        num_passes: int,
        device: torch.device,
        choose: Callable[[Tensor], tuple[Tensor, Tensor]] = greedy_tokens,
    ) -> None:
        self._draft = draft
        self._choose = choose
        self._spans = spans
        self._vocab_size = vocab_size
        self._max_num_tokens = max_num_tokens
        self._device = device
        self._uploads = HostBuffers(device, num_passes + 1)  # one catches up
        self._texts: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}  # tokens whose keys and values the draft's layers have
        self._found: dict[str, int] = {}  # of requests that have come since: tokens that the target found computed
        self._written: set[int] = set()  # blocks whose tokens the draft's layers have computed as well

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._texts[request_id] = list(token_ids)
        if self._draft.shares_cache:
            self._num_computed[request_id] = max(0, num_computed_tokens - 1)
        else:
            self._num_computed[request_id], self._found[request_id] = 0, num_computed_tokens

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        text = self._texts[request_id]
        text += token_ids
        if self._draft.shares_cache:
            self._num_computed[request_id] = len(text) - 1
        else:  # of what it has drafted itself, as far as that was accepted
            self._num_computed[request_id] = min(self._num_computed[request_id], len(text) - 1)

    def forget(self, request_id: str) -> None:
        if request_id in self._texts and not self._draft.shares_cache:
            self._note(request_id)
        self._texts.pop(request_id, None)
        self._num_computed.pop(request_id, None)
        self._found.pop(request_id, None)

    def _note(self, request_id: str) -> None:
        """Which of a request's blocks the draft's layers have written whole. What others find in the cache are such blocks, and
        blocks of steps in which nobody drafted."""
        blocks, block_size = self._spans.blocks_of(request_id), self._spans.block_size
        if request_id in self._found:  # nothing was computed: what it has found is as it was
            self._written.difference_update(blocks[self._found[request_id] // block_size :])
            return
        num_whole = self._num_computed[request_id] // block_size
        self._written.update(blocks[:num_whole])
        self._written.difference_update(blocks[num_whole:])

    def _look_up(self) -> None:
        """Of requests that have come, how much of what the target has found computed the draft's layers have as well."""
        if not self._found:
            return
        found, self._found = self._found, {}
        for request_id in self._texts:
            if request_id not in found:
                self._note(request_id)
        for request_id, num_found in found.items():
            blocks = self._spans.blocks_of(request_id)[: num_found // self._spans.block_size]
            missing = (
                place for place, block in enumerate(blocks) if block != NULL_BLOCK and block not in self._written
            )
            num_whole = next(missing, len(blocks))  # the null block stands behind windows
            self._num_computed[request_id] = num_whole * self._spans.block_size

    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None:
        if self._draft.shares_cache:
            return
        limit = self._draft.max_position_embeddings
        self._catch_up({request_id: min(end, limit) for request_id, (_, end) in spans.items()})

    def prepare(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        ends = {it.request_id: len(self._texts[it.request_id]) + it.max_tokens for it in requests}
        if max(ends.values()) > self._draft.max_position_embeddings:
            return None
        if not self._draft.shares_cache:
            self._catch_up({it.request_id: len(self._texts[it.request_id]) - 1 for it in requests})
            self._num_computed |= ends
        return [it.max_tokens for it in requests]

    def draft(self, chain: DraftChain) -> Tensor:
        drafted, token_ids = [], chain.last_token_ids
        for metadata in chain.passes[:-1]:
            token_ids = self._choose(self._to_target(self._forward(token_ids, chain.rows, metadata)))[0]
            drafted.append(token_ids)
        if not self._draft.shares_cache:  # should all be accepted, nothing is missing of them
            self._forward(token_ids, chain.rows, chain.passes[-1])
        return torch.stack(drafted, dim=1)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        self._look_up()
        limit = self._draft.max_position_embeddings
        counts = [min(it.max_tokens, max(0, limit + 1 - len(self._texts[it.request_id]))) for it in requests]
        k = max(counts)
        drafted = torch.zeros(len(requests), k, dtype=torch.int64, device=self._device)
        sampling = DraftSampling.of(requests, k, self._device)
        probs = torch.zeros(len(requests), k, self._vocab_size, device=self._device) if sampling and k else None
        lacking = {it.request_id: len(self._texts[it.request_id]) for it, n in zip(requests, counts, strict=True) if n}
        if sum(num_tokens - self._num_computed[key] for key, num_tokens in lacking.items()) > self._max_num_tokens:
            self._catch_up({key: num_tokens - 1 for key, num_tokens in lacking.items()})
        for index in range(k):
            rows = [row for row, count in enumerate(counts) if count > index]
            ids = [requests[row].request_id for row in rows]
            if index == 0:
                tokens = {key: self._texts[key][self._num_computed[key] :] for key in ids}
            else:
                tokens = dict.fromkeys(ids, (0,))  # the draft's last one, which the host has not seen
            ends = [len(self._texts[key]) + index for key in ids]
            places = copy_to(np.array(rows, dtype=np.int64), self._device)
            logits = self._logits(tokens, ends, None if index == 0 else drafted[places, index - 1])
            if probs is None or sampling is None:
                drafted[places, index] = self._choose(logits)[0]
            else:
                drafted[places, index], probs[places, index] = sampling.draw(logits, places, index)
            self._num_computed |= dict(zip(ids, ends, strict=True))
        return DraftOutput(drafted, counts, probs)

    def _catch_up(self, ends: Mapping[str, int]) -> None:
        """Compute these requests' tokens up to those places, in as many passes as it takes."""
        self._look_up()
        while lacking := {key: end for key, end in ends.items() if self._num_computed[key] < end}:
            share = max(1, self._max_num_tokens // len(lacking))
            reached = {key: min(end, self._num_computed[key] + share) for key, end in lacking.items()}
            tokens = {key: self._texts[key][self._num_computed[key] : end] for key, end in reached.items()}
            self._hidden(tokens, list(reached.values()), None)
            self._num_computed |= reached
            if self._device.type == "cuda":  # there may be more passes than buffers
                torch.cuda.current_stream(self._device).synchronize()

    def _logits(self, tokens: Mapping[str, Sequence[int]], ends: Sequence[int], drafted: Tensor | None) -> Tensor:
        """float32 [num_reqs, vocab_size] of the target, behind the last token of each."""
        return self._to_target(self._hidden(tokens, ends, drafted))

    def _to_target(self, hidden: Tensor) -> Tensor:
        """Logits float32 [num_rows, vocab_size] of the target's vocabulary, of the draft's hidden states."""
        logits = self._draft.decoder.compute_logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def _hidden(self, tokens: Mapping[str, Sequence[int]], ends: Sequence[int], drafted: Tensor | None) -> Tensor:
        """Run tokens, which are `drafted` if that is given; the hidden states of each request's last one."""
        step = self._spans.span(tokens, ends)
        tensors = to_device(step, self._uploads, self._device)
        token_ids = tensors.token_ids if drafted is None else drafted
        return self._forward(token_ids, tensors.token_rows, tensors.metadata)[tensors.logits_indices]

    def _forward(self, token_ids: Tensor, rows: Tensor, metadata: AttentionMetadata) -> Tensor:
        draft = self._draft
        if draft.vocab_size < self._vocab_size:  # padding of the target's, which a draft may guess wrong
            token_ids = token_ids.clamp(max=draft.vocab_size - 1)
        return draft.decoder.forward(token_ids, rows, draft.last_tokens, draft.layer_caches, metadata, draft.attention)
