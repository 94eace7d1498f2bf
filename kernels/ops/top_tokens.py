"""The likeliest few tokens of each row, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 2048
MAX_WIDTH = 32


@triton.jit
def _take_largest(values, ids, is_left):
    """The largest value that is left, the lowest id that has it, and what is left without that; no id if nothing was."""
    largest = tl.max(tl.where(is_left, values, float("-inf")), axis=0)
    token_id = tl.min(tl.where(is_left & (values == largest), ids, 2**31 - 1), axis=0)
    return largest, token_id, is_left & (ids != token_id)


@triton.jit(do_not_specialize=["num_chunks"])
def _top_of_chunk_kernel(
    chunk_top_ptr,
    chunk_token_ids_ptr,
    logits_ptr,
    stride_logits_row,
    vocab_size,
    num_chunks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of BLOCK logits of a row per program, in falling order. Grid: (num_rows, num_chunks)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    is_left = column < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits_row + column, mask=is_left, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))
    place = (row * num_chunks + chunk) * WIDTH
    for rank in range(WIDTH):
        largest, token_id, is_left = _take_largest(logits, column, is_left)
        tl.store(chunk_top_ptr + place + rank, largest)
        tl.store(chunk_token_ids_ptr + place + rank, token_id)


@triton.jit(do_not_specialize=["num_candidates"])
def _top_of_row_kernel(
    token_ids_ptr,
    chunk_top_ptr,
    chunk_token_ids_ptr,
    vocabulary_ptr,
    num_candidates,
    WIDTH: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program, from what its chunks hold. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    is_left = candidate < num_candidates
    place = row * num_candidates + candidate
    top = tl.load(chunk_top_ptr + place, mask=is_left, other=float("-inf"))
    ids = tl.load(chunk_token_ids_ptr + place, mask=is_left, other=2**31 - 1)
    for rank in range(WIDTH):
        _, token_id, is_left = _take_largest(top, ids, is_left)
        if MAPPED:
            tl.store(token_ids_ptr + row * WIDTH + rank, tl.load(vocabulary_ptr + token_id))
        else:
            tl.store(token_ids_ptr + row * WIDTH + rank, token_id.to(tl.int64))


def top_tokens(logits: Tensor, width: int, vocabulary: Tensor | None = None) -> Tensor:
    """Take each row's largest logits, as many as `width`, in falling order, and among equals the lowest id first.

    Two launches: rows are cut into chunks, each of which gives as many, and the second takes the largest of those.

    Args:
        logits: float32 [num_rows, vocab_size], strides (any, 1); NaN counts as the smallest
        width: 1 to vocab_size, at most 32
        vocabulary: int64 [vocab_size], stride (1,), the id of each column's token; by default the column
    Returns:
        token_ids int64 [num_rows, width], different ones in a row. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or the width is not.
    """
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    num_rows, vocab_size = logits.shape
    if not 1 <= width <= min(vocab_size, MAX_WIDTH):
        raise ValueError(f"width is {width}; 1 to {min(vocab_size, MAX_WIDTH)} is expected of {vocab_size} columns")
    if vocabulary is not None:
        check_tensor("vocabulary", vocabulary, (vocab_size,), torch.int64, logits.device)
    token_ids = torch.empty((num_rows, width), dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    num_chunks = triton.cdiv(vocab_size, BLOCK)
    num_candidates = num_chunks * width
    chunk_top = torch.empty((num_rows, num_candidates), dtype=torch.float32, device=logits.device)
    chunk_token_ids = torch.empty((num_rows, num_candidates), dtype=torch.int32, device=logits.device)
    _top_of_chunk_kernel[(num_rows, num_chunks)](
        chunk_top,
        chunk_token_ids,
        logits,
        logits.stride(0),
        vocab_size,
        num_chunks,
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=4,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    _top_of_row_kernel[(num_rows,)](
        token_ids,
        chunk_top,
        chunk_token_ids,
        vocabulary,
        num_candidates,
        WIDTH=width,
        MAPPED=vocabulary is not None,
        BLOCK=triton.next_power_of_2(num_candidates),
        num_warps=1 if num_candidates <= 512 else 4,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    return token_ids
