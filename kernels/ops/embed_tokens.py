"""Looking up embeddings of tokens that the host may not know yet, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.reference.deferred_norm import DeferredNorm


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr", "rows_ptr"])
def _embed_tokens_kernel(
    output_ptr,
    token_ids_ptr,
    rows_ptr,
    sampled_token_ids_ptr,
    embedding_ptr,
    next_norm_weight_ptr,
    scaled_ptr,
    square_sums_ptr,
    stride_output_token,
    stride_embedding_id,
    NEXT_NORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token per program. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + token)
    if token_id < 0:
        token_id = tl.load(sampled_token_ids_ptr + tl.load(rows_ptr + token))
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    values = tl.load(embedding_ptr + token_id * stride_embedding_id + column, mask=mask, other=0.0)
    tl.store(output_ptr + token * stride_output_token + column, values, mask=mask)
    if NEXT_NORM:
        wide = values.to(tl.float32)
        tl.store(square_sums_ptr + token, tl.sum(wide * wide, axis=0))
        scaled = wide * tl.load(next_norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + token * stride_output_token + column, scaled.to(values.dtype), mask=mask)


def embed_tokens(
    token_ids: Tensor,
    rows: Tensor,
    sampled_token_ids: Tensor,
    embedding: Tensor,
    next_norm_weight: Tensor | None = None,
) -> tuple[Tensor, DeferredNorm | None]:
    """The embedding of each token; a negative id stands for the last token sampled in the request's row.

    `y[t] = embedding[token_ids[t]]` where `token_ids[t] >= 0`, else `embedding[sampled_token_ids[rows[t]]]`. With
    `next_norm_weight` also `scaled = cast(y * next_norm_weight)` and each row's sum of squares, as a single part.

    Args:
        token_ids: int64 [num_tokens], stride (1,), below vocab_size
        rows: int64 [num_tokens], stride (1,): the row of each token's request
        sampled_token_ids: int64 [num_rows], stride (1,), in 0..vocab_size - 1
        embedding: float32, bfloat16 or float16 [vocab_size, hidden], strides (any, 1)
        next_norm_weight: embedding.dtype [hidden], stride (1,): of the RMS norm that follows
    Returns:
        embedding.dtype [num_tokens, hidden], contiguous, and the deferred norm if one follows; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above. Ids and rows are not read, hence not checked.
    """
    check_float_dtype("embedding", embedding)
    check_tensor("embedding", embedding, (None, None), embedding.dtype, embedding.device)
    num_tokens, hidden = token_ids.numel(), embedding.shape[1]
    check_tensor("token_ids", token_ids, (num_tokens,), torch.int64, embedding.device)
    check_tensor("rows", rows, (num_tokens,), torch.int64, embedding.device)
    check_tensor("sampled_token_ids", sampled_token_ids, (None,), torch.int64, embedding.device)
    output = torch.empty((num_tokens, hidden), dtype=embedding.dtype, device=embedding.device)
    deferred = None
    if next_norm_weight is not None:
        check_tensor("next_norm_weight", next_norm_weight, (hidden,), embedding.dtype, embedding.device)
        square_sums = torch.empty((num_tokens, 1), dtype=torch.float32, device=embedding.device)
        deferred = DeferredNorm(torch.empty_like(output), square_sums)
    if output.numel() == 0:
        return output, deferred
    block = triton.next_power_of_2(hidden)
    _embed_tokens_kernel[(num_tokens,)](
        output,
        token_ids,
        rows,
        sampled_token_ids,
        embedding,
        next_norm_weight,
        deferred.scaled if deferred else None,
        deferred.square_sums if deferred else None,
        output.stride(0),
        embedding.stride(0),
        NEXT_NORM=deferred is not None,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    return output, deferred
