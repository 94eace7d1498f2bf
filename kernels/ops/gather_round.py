"""The tokens of a step that verifies drafts, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 128


@triton.jit(do_not_specialize=["num_places", "num_tokens", "k"])
def _gather_round_kernel(
    token_ids_ptr,
    draft_token_ids_ptr,
    last_token_ids_ptr,
    drafts_ptr,
    rows_ptr,
    sources_ptr,
    stride_drafts_row,
    num_places,
    num_tokens,
    k,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens and as many drafts per program. Grid: (cdiv(max(num_places, num_tokens), BLOCK),)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < num_tokens
    source = tl.load(sources_ptr + index, mask=is_token, other=0)
    row = tl.load(rows_ptr + source // (k + 1), mask=is_token, other=0)
    column = source % (k + 1)
    last = tl.load(last_token_ids_ptr + row, mask=is_token & (column == 0), other=0)
    draft = tl.load(drafts_ptr + row * stride_drafts_row + column - 1, mask=is_token & (column > 0), other=0)
    tl.store(token_ids_ptr + index, tl.where(column == 0, last, draft), mask=is_token)

    is_place = index < num_places
    row = tl.load(rows_ptr + index // k, mask=is_place, other=0)
    draft = tl.load(drafts_ptr + row * stride_drafts_row + index % k, mask=is_place, other=0)
    tl.store(draft_token_ids_ptr + index, draft, mask=is_place)


def gather_round(last_token_ids: Tensor, drafts: Tensor, rows: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's last token and its drafts, as the tokens of one step.

    In the matrix of num_rows x (k + 1), row r is `last_token_ids[rows[r]]` and `drafts[rows[r]]` behind it; the step has the
    places of it that `sources` says.

    Args:
        last_token_ids: int64 [num_batch_rows], stride (1,)
        drafts: int64 [num_batch_rows, k], strides (any, 1), k at least 1
        rows: int64 [num_rows], stride (1,), below num_batch_rows
        sources: int64 [num_tokens], stride (1,), below num_rows * (k + 1)
    Returns:
        token_ids int64 [num_tokens], and draft_token_ids int64 [num_rows, k]: `drafts[rows]`. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above. Values are not read, hence not checked.
    """
    device = last_token_ids.device
    num_batch_rows, num_rows, num_tokens = last_token_ids.numel(), rows.numel(), sources.numel()
    check_tensor("last_token_ids", last_token_ids, (num_batch_rows,), torch.int64, device)
    check_tensor("drafts", drafts, (num_batch_rows, None), torch.int64, device)
    check_tensor("rows", rows, (num_rows,), torch.int64, device)
    check_tensor("sources", sources, (num_tokens,), torch.int64, device)
    k = drafts.shape[1]
    if k == 0:
        raise ValueError("drafts has 0 columns; at least 1 is expected")
    token_ids = torch.empty((num_tokens,), dtype=torch.int64, device=device)
    draft_token_ids = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    if num_rows:
        _gather_round_kernel[(triton.cdiv(max(num_rows * k, num_tokens), BLOCK),)](
            token_ids,
            draft_token_ids,
            last_token_ids,
            drafts,
            rows,
            sources,
            drafts.stride(0),
            num_rows * k,
            num_tokens,
            k,
            BLOCK=BLOCK,
        )
    return token_ids, draft_token_ids
