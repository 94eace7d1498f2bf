"""What a verified round leaves for the next step, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "k"])
def _settle_round_kernel(
    next_token_ids_ptr,
    last_indices_ptr,
    ids_ptr,
    rows_ptr,
    starts_ptr,
    sources_ptr,
    last_token_ids_ptr,
    num_computed_ptr,
    num_rows,
    num_tokens,
    k,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens and as many rows per program. Grid: (cdiv(max(num_rows, num_tokens), BLOCK),)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = 2 * k + 3
    is_token = index < num_tokens
    source = tl.load(sources_ptr + index, mask=is_token, other=0)
    following = tl.load(ids_ptr + source // (k + 1) * width + source % (k + 1), mask=is_token, other=0)
    tl.store(next_token_ids_ptr + index, tl.maximum(following, 0), mask=is_token)

    is_row = index < num_rows
    num_accepted = tl.load(ids_ptr + index * width + k + 1, mask=is_row, other=0)
    last = tl.load(ids_ptr + index * width + num_accepted, mask=is_row, other=0)
    row = tl.load(rows_ptr + index, mask=is_row, other=0)
    start = tl.load(starts_ptr + index, mask=is_row, other=0)
    tl.store(last_token_ids_ptr + row, last, mask=is_row)
    tl.store(last_indices_ptr + index, start + num_accepted, mask=is_row)
    num_computed = tl.load(num_computed_ptr + index, mask=is_row, other=-1)
    tl.store(num_computed_ptr + index, num_computed + num_accepted + 1, mask=num_computed >= 0)


def settle_round(
    ids: Tensor, rows: Tensor, starts: Tensor, sources: Tensor, last_token_ids: Tensor, num_computed: Tensor
) -> tuple[Tensor, Tensor]:
    """Make the last token of each row of a round its last one in the batch, and say what follows each token of the step.

    `last_token_ids[rows[r]] = ids[r, num_accepted[r]]`, finite or not, for the next step may be under way already; and with
    `sources[t] = r * (k + 1) + j`, `next_token_ids[t] = ids[r, j]`, or 0 where nothing follows because a token was rejected.
    `num_computed[r]` goes on by `num_accepted[r] + 1`, unless it is negative.

    Args:
        ids: int64 [num_rows, 2 * k + 3], contiguous, as `verify_chain` leaves them
        rows: int64 [num_rows], stride (1,), below num_batch_rows; only padding may share one, and then any may win
        starts: int64 [num_rows], stride (1,), each row's first token in the step
        sources: int64 [num_tokens], stride (1,), the place of each token in the matrix of num_rows x (k + 1)
        last_token_ids: int64 [num_batch_rows], stride (1,); mutated
        num_computed: int64 [num_rows], stride (1,), tokens before each row's last one; negative: there is no request; mutated
    Returns:
        next_token_ids int64 [num_tokens], and last_indices int64 [num_rows]: `starts + num_accepted`.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above. Values are not read, hence not checked.
    """
    check_tensor("ids", ids, (None, None), torch.int64, ids.device)
    num_rows, width = ids.shape
    if width < 5 or width % 2 == 0:
        raise ValueError(f"ids has {width} columns; 2 * k + 3 are expected, k being 1 and more")
    if not ids.is_contiguous():
        raise ValueError(f"ids has strides {list(ids.stride())}; expected it contiguous")
    check_tensor("rows", rows, (num_rows,), torch.int64, ids.device)
    check_tensor("starts", starts, (num_rows,), torch.int64, ids.device)
    check_tensor("sources", sources, (None,), torch.int64, ids.device)
    check_tensor("last_token_ids", last_token_ids, (None,), torch.int64, ids.device)
    check_tensor("num_computed", num_computed, (num_rows,), torch.int64, ids.device)
    num_tokens = sources.numel()
    next_token_ids = torch.empty((num_tokens,), dtype=torch.int64, device=ids.device)
    last_indices = torch.empty((num_rows,), dtype=torch.int64, device=ids.device)
    if num_rows:
        _settle_round_kernel[(triton.cdiv(max(num_rows, num_tokens), BLOCK),)](
            next_token_ids,
            last_indices,
            ids,
            rows,
            starts,
            sources,
            last_token_ids,
            num_computed,
            num_rows,
            num_tokens,
            (width - 3) // 2,
            BLOCK=BLOCK,
        )
    return next_token_ids, last_indices
