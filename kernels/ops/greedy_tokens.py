"""The likeliest token of each row, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 2048
# Programs that keep a large card's multiprocessors busy; rows are cut into chunks until there are so many.
MANY_PROGRAMS = 512
# A row that one program reads in less time than a second launch takes, with so many times the usual warps and lanes.
MAX_WHOLE_ROW = 16_384
WIDER = 4


@triton.jit
def _store_row(token_ids_ptr, finite_ptr, vocabulary_ptr, row, largest, token_id, has_nan, MAPPED: tl.constexpr):
    if MAPPED:
        token_id = tl.load(vocabulary_ptr + token_id)
    tl.store(token_ids_ptr + row, token_id)
    tl.store(finite_ptr + row, (has_nan == 0) & (largest > float("-inf")) & (largest < float("inf")))


# Numbers of chunks are not compiled in: they change with the number of rows, so from step to step.
@triton.jit(do_not_specialize=["num_chunks"])
def _largest_of_chunk_kernel(
    token_ids_ptr,
    finite_ptr,
    chunk_max_ptr,
    chunk_token_ids_ptr,
    logits_ptr,
    vocabulary_ptr,
    stride_logits_row,
    vocab_size,
    chunk_size,
    num_chunks,
    MAPPED: tl.constexpr,
    IS_WHOLE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The maximum of one chunk of a row per program, NaN if the chunk holds one, and the lowest id that has it.

    A row that is one chunk is finished here. Grid: (num_rows, num_chunks).
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunk_start = chunk * chunk_size
    lane = tl.arange(0, BLOCK)
    # Each lane keeps its largest, and as its columns rise, a strict comparison keeps the lowest of equals.
    lane_max = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    lane_token_id = chunk_start + lane
    lane_has_nan = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(chunk_start, tl.minimum(chunk_start + chunk_size, vocab_size), BLOCK):
        column = start + lane
        logits = tl.load(logits_ptr + row * stride_logits_row + column, mask=column < vocab_size, other=float("-inf"))
        is_larger = logits > lane_max
        lane_max = tl.where(is_larger, logits, lane_max)
        lane_token_id = tl.where(is_larger, column, lane_token_id)
        lane_has_nan = tl.where(logits != logits, 1, lane_has_nan)
    largest = tl.max(lane_max, axis=0)
    token_id = tl.min(tl.where(lane_max == largest, lane_token_id, vocab_size - 1), axis=0)
    has_nan = tl.max(lane_has_nan, axis=0)
    if IS_WHOLE_ROW:
        _store_row(token_ids_ptr, finite_ptr, vocabulary_ptr, row, largest, token_id, has_nan, MAPPED)
    else:
        chunk_max = tl.where(has_nan == 0, largest, float("nan"))
        tl.store(chunk_max_ptr + row * num_chunks + chunk, chunk_max)
        tl.store(chunk_token_ids_ptr + row * num_chunks + chunk, token_id)


@triton.jit(do_not_specialize=["num_chunks"])
def _largest_of_row_kernel(
    token_ids_ptr,
    finite_ptr,
    chunk_max_ptr,
    chunk_token_ids_ptr,
    vocabulary_ptr,
    vocab_size,
    num_chunks,
    MAPPED: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One row per program, from its chunks. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    mask = chunk < num_chunks
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=mask, other=float("-inf"))
    chunk_token_id = tl.load(chunk_token_ids_ptr + row * num_chunks + chunk, mask=mask, other=0)
    is_nan = chunk_max != chunk_max
    largest = tl.max(tl.where(is_nan, float("-inf"), chunk_max), axis=0)
    token_id = tl.min(tl.where(mask & (chunk_max == largest), chunk_token_id, vocab_size - 1), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0)
    _store_row(token_ids_ptr, finite_ptr, vocabulary_ptr, row, largest, token_id, has_nan, MAPPED)


def greedy_tokens(logits: Tensor, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Take each row's largest logit, the lowest id among equals.

    One pass over the logits. Long rows are cut into as many chunks as it takes to fill a card, and a second launch joins
    them; an exact maximum does not depend on the cut. How they are cut follows from the shape alone.

    Args:
        logits: float32 [num_rows, vocab_size], strides (any, 1)
        vocabulary: int64 [vocab_size], stride (1,), ascending: the id of each column's token; by default the column
    Returns:
        token_ids int64 [num_rows], and finite bool [num_rows]: False where a logit is NaN or the largest is infinite, and
        then the token is some id of the vocabulary. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype or stride is not as above, or the vocabulary is empty.
    """
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise ValueError("logits has 0 columns; at least 1 is expected")
    if vocabulary is not None:
        check_tensor("vocabulary", vocabulary, (vocab_size,), torch.int64, logits.device)

    token_ids = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    finite = torch.empty((num_rows,), dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return token_ids, finite
    if vocab_size <= MAX_WHOLE_ROW:
        block, num_warps, num_chunks = WIDER * BLOCK, WIDER * 4, 1
    else:
        block, num_warps = BLOCK, 4
        num_chunks = min(triton.cdiv(MANY_PROGRAMS, num_rows), triton.cdiv(vocab_size, block))
    # Whole blocks, so that no chunk but the last has idle lanes.
    chunk_size = block * triton.cdiv(vocab_size, block * num_chunks)
    num_chunks = triton.cdiv(vocab_size, chunk_size)
    chunk_max = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_token_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    _largest_of_chunk_kernel[(num_rows, num_chunks)](
        token_ids,
        finite,
        chunk_max,
        chunk_token_ids,
        logits,
        vocabulary,
        logits.stride(0),
        vocab_size,
        chunk_size,
        num_chunks,
        MAPPED=vocabulary is not None,
        IS_WHOLE_ROW=num_chunks == 1,
        BLOCK=block,
        num_warps=num_warps,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    if num_chunks > 1:
        _largest_of_row_kernel[(num_rows,)](
            token_ids,
            finite,
            chunk_max,
            chunk_token_ids,
            vocabulary,
            vocab_size,
            num_chunks,
            MAPPED=vocabulary is not None,
            BLOCK_CHUNKS=triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK)),
            num_warps=1,  # pyright: ignore[reportCallIssue]  (a launch option)
        )
    return token_ids, finite
