"""Keeping sampled tokens for the next step, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 128


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(
    do_not_specialize=["num_sampled"],
    do_not_specialize_on_alignment=["token_ids_ptr", "finite_ptr", "rows_ptr", "seq_lens_ptr"],
)
def _record_tokens_kernel(
    outcome_ptr,
    token_ids_ptr,
    finite_ptr,
    rows_ptr,
    sampled_token_ids_ptr,
    seq_lens_ptr,
    num_sampled,
    GROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens per program. Grid: (cdiv(num_sampled, BLOCK),)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_sampled
    token_id = tl.load(token_ids_ptr + index, mask=mask, other=0)
    finite = tl.load(finite_ptr + index, mask=mask, other=0)
    row = tl.load(rows_ptr + index, mask=mask, other=0)
    tl.store(sampled_token_ids_ptr + row, token_id, mask=mask)
    tl.store(outcome_ptr + index, tl.where(finite != 0, token_id, -1), mask=mask)
    if GROWS:
        seq_len = tl.load(seq_lens_ptr + index, mask=mask, other=0)
        tl.store(seq_lens_ptr + index, tl.where(seq_len > 0, seq_len + 1, 0), mask=mask)


def record_tokens(
    token_ids: Tensor, finite: Tensor, rows: Tensor, sampled_token_ids: Tensor, seq_lens: Tensor | None = None
) -> Tensor:
    """Make each token the last one of its row, and tell the host in one tensor what became of it.

    `sampled_token_ids[rows[i]] = token_ids[i]`; `y[i] = token_ids[i]` where `finite[i]`, else -1. Lengths in `seq_lens`
    grow by one, those of 0 (padding) excepted.

    Args:
        token_ids: int64 [num_sampled], stride (1,)
        finite: bool [num_sampled], stride (1,)
        rows: int64 [num_sampled], stride (1,), below num_rows; only padding may share one, and then any may win
        sampled_token_ids: int64 [num_rows], stride (1,); mutated
        seq_lens: int32 [num_sampled], stride (1,), lengths that grow with the tokens; mutated
    Returns:
        int64 [num_sampled].
    Raises:
        ValueError: a shape, dtype, device or stride is not as above. Rows are not read, hence not checked.
    """
    num_sampled = token_ids.numel()
    check_tensor("token_ids", token_ids, (num_sampled,), torch.int64, token_ids.device)
    check_tensor("finite", finite, (num_sampled,), torch.bool, token_ids.device)
    check_tensor("rows", rows, (num_sampled,), torch.int64, token_ids.device)
    if seq_lens is not None:
        check_tensor("seq_lens", seq_lens, (num_sampled,), torch.int32, token_ids.device)
    check_tensor("sampled_token_ids", sampled_token_ids, (None,), torch.int64, token_ids.device)
    outcome = torch.empty((num_sampled,), dtype=torch.int64, device=token_ids.device)
    if num_sampled:
        grid = (triton.cdiv(num_sampled, BLOCK),)
        _record_tokens_kernel[grid](
            outcome,
            token_ids,
            finite,
            rows,
            sampled_token_ids,
            seq_lens,
            num_sampled,
            GROWS=seq_lens is not None,
            BLOCK=BLOCK,
        )
    return outcome
