"""`RoundOps`: what the graph that verifies a round runs beside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from backend.sample.rejection_sampler import RejectionSampler
from backend.worker.round_download import pack_round, packed_ids
from backend.worker.round_tensors import SampleNodes
from backend.worker.round_texts import NgramDrafts
from kernels.reference.gather_round import gather_round
from kernels.reference.ngram_drafts import ngram_drafts
from kernels.reference.round_positions import RoundPositions, round_positions
from kernels.reference.sample_nodes import SampledNodes, sample_nodes
from kernels.reference.settle_round import settle_round
from kernels.reference.verify_chain import verify_chain

Verify = Callable[[Tensor, Tensor, Tensor, SampledNodes | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RoundOps:
    """One implementation of each op; the signatures are those of `kernels.reference`."""

    round_positions: Callable[[Tensor, Tensor, Tensor, int, int], RoundPositions]
    gather_round: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    sample_nodes: SampleNodes
    verify_chain: Verify
    settle_round: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    ngram_drafts: NgramDrafts


REFERENCE_ROUND_OPS = RoundOps(round_positions, gather_round, sample_nodes, verify_chain, settle_round, ngram_drafts)


def triton_round_ops() -> RoundOps:
    """The Triton launchers. Raises `ImportError` where triton is not installed."""
    from kernels.ops.gather_round import gather_round
    from kernels.ops.ngram_drafts import ngram_drafts
    from kernels.ops.round_positions import round_positions
    from kernels.ops.sample_nodes import sample_nodes
    from kernels.ops.settle_round import settle_round
    from kernels.ops.verify_chain import verify_chain

    return RoundOps(round_positions, gather_round, sample_nodes, verify_chain, settle_round, ngram_drafts)


def verify_with(sampler: RejectionSampler) -> Verify:
    """A sampler that accepts in a way of its own, in place of the op `verify_chain`. All rows are greedy to it."""

    def verify(
        logits: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor, _: SampledNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        num_rows, k = draft_token_ids.shape
        verified = sampler(logits.view(num_rows, k + 1, -1), draft_token_ids, num_draft_tokens, None, None)
        packed = pack_round(verified, draft_token_ids)
        return packed, packed_ids(packed, num_rows, k)

    return verify
