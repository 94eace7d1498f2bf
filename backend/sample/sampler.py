"""`Sampler`: logits to one token per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.sample.metadata import SamplingMetadata, SamplingTensors, copy_to
from kernels.reference.greedy_tokens import greedy_tokens
from kernels.reference.sample_tokens import sample_tokens


@dataclass(frozen=True, slots=True)
class SamplerOps:
    """One implementation of each op; the signatures are those of `kernels.reference`."""

    greedy_tokens: Callable[[Tensor], tuple[Tensor, Tensor]]
    sample_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


REFERENCE_OPS = SamplerOps(greedy_tokens=greedy_tokens, sample_tokens=sample_tokens)


def triton_ops() -> SamplerOps:
    """The Triton launchers. Raises `ImportError` where triton is not installed."""
    from kernels.ops.greedy_tokens import greedy_tokens
    from kernels.ops.sample_tokens import sample_tokens

    return SamplerOps(greedy_tokens=greedy_tokens, sample_tokens=sample_tokens)


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """On the logits' device, perhaps not computed yet: reading one waits for it."""

    token_ids: Tensor  # int64 [num_rows]
    finite: Tensor  # bool [num_rows]; False: the row had no usable logits and its token means nothing


class Sampler:
    """Greedy rows take the largest logit, the lowest id among equals. Others draw from the filtered distribution.

    Filtering is temperature, then top-k, then top-p on what top-k left (the order of transformers and vLLM). The draw inverts
    the cumulative distribution of the tokens left, in order of id, at one counter-based uniform. So a row's token depends on
    its own logits and parameters alone. Nothing here waits for the device.
    """

    def __init__(self, ops: SamplerOps = REFERENCE_OPS) -> None:
        self._ops = ops

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SampledTensors:
        """Args:
        logits: fp32 [num_rows, vocab_size]; banned tokens are overwritten there.
        """
        _ban(logits, metadata.banned_token_ids)
        tensors = SamplingTensors.build(metadata, logits.device)
        if tensors is None:
            return SampledTensors(*self._ops.greedy_tokens(logits))
        return SampledTensors(
            *self._ops.sample_tokens(logits, tensors.temperature, tensors.top_k, tensors.top_p, tensors.draws)
        )


def _ban(logits: Tensor, banned_token_ids: list[tuple[int, ...]]) -> None:
    """Set the logits of each row's banned ids to -inf."""
    pairs = [(row, token_id) for row, banned in enumerate(banned_token_ids) for token_id in banned]
    if pairs:
        rows, token_ids = copy_to(np.array(pairs, dtype=np.int64).T.copy(), logits.device)
        logits.index_put_((rows, token_ids), logits.new_full((), -torch.inf))
