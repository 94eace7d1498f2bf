"""Drafts looked up in each request's own text, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 2048


@triton.jit
def _token_at(text_ptr, new_ptr, num_before, place, mask):
    """Tokens of a text that goes on, at `num_before`, with others that are not written there yet."""
    before = tl.load(text_ptr + place, mask=mask & (place < num_before), other=0)
    new = tl.load(new_ptr + place - num_before, mask=mask & (place >= num_before), other=0)
    return tl.where(place < num_before, before, new.to(tl.int32))


# A round's arrays lie end to end in one buffer: neither where each begins nor a size is to make another kernel of it.
@triton.jit(
    do_not_specialize=["max_len", "num_chunks", "k", "n_max", "stride_ids_row", "stride_texts_row"],
    do_not_specialize_on_alignment=["rows_ptr", "num_granted_ptr"],
)
def _find_in_chunk_kernel(
    chunk_found_ptr,
    ids_ptr,
    rows_ptr,
    num_granted_ptr,
    texts_ptr,
    lengths_ptr,
    stride_ids_row,
    stride_texts_row,
    max_len,
    num_chunks,
    k,
    n_max,
    BLOCK: tl.constexpr,
):
    """Of BLOCK places of a text, the one behind most of the tokens that are its last: that number * 2^32 + the place.

    Grid: (num_rows, num_chunks).
    """
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    is_granted = tl.load(num_granted_ptr + request) > 0
    row = tl.load(rows_ptr + request)
    text_ptr = texts_ptr + row * stride_texts_row
    new_ptr = ids_ptr + request * stride_ids_row
    num_before = tl.load(lengths_ptr + row).to(tl.int32)
    num_new = tl.load(new_ptr + k + 1).to(tl.int32) + 1
    length = tl.where(is_granted, tl.minimum(num_before + num_new, max_len), 0)

    place = chunk * BLOCK + tl.arange(0, BLOCK)
    is_same = place < length
    num_same = tl.zeros((BLOCK,), dtype=tl.int32)
    for n in range(1, n_max + 1):
        is_same = is_same & (place >= n)
        last = _token_at(text_ptr, new_ptr, num_before, length - n, length >= n)
        is_same = is_same & (_token_at(text_ptr, new_ptr, num_before, place - n, is_same) == last)
        num_same += is_same.to(tl.int32)
    found = tl.max((num_same.to(tl.int64) << 32) + place, axis=0)
    tl.store(chunk_found_ptr + request * num_chunks + chunk, found)


@triton.jit(
    do_not_specialize=[
        "max_len",
        "num_chunks",
        "k",
        "n_min",
        "stride_ids_row",
        "stride_texts_row",
        "stride_drafts_row",
    ],
    do_not_specialize_on_alignment=["drafts_ptr", "counts_ptr", "rows_ptr", "num_granted_ptr"],
)
def _draft_from_text_kernel(
    texts_ptr,
    lengths_ptr,
    drafts_ptr,
    counts_ptr,
    chunk_found_ptr,
    ids_ptr,
    rows_ptr,
    num_granted_ptr,
    stride_ids_row,
    stride_texts_row,
    stride_drafts_row,
    max_len,
    num_chunks,
    k,
    n_min,
    BLOCK_K: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One text per program: its best place over the chunks, what follows there, and the new tokens. Grid: (num_rows,)."""
    request = tl.program_id(0).to(tl.int64)
    granted = tl.load(num_granted_ptr + request)
    row = tl.load(rows_ptr + request)
    text_ptr = texts_ptr + row * stride_texts_row
    new_ptr = ids_ptr + request * stride_ids_row
    num_before = tl.load(lengths_ptr + row).to(tl.int32)
    num_new = tl.where(granted > 0, tl.load(new_ptr + k + 1).to(tl.int32) + 1, 0)
    length = tl.minimum(num_before + num_new, max_len)

    chunk = tl.arange(0, BLOCK_CHUNKS)
    chunk_found = tl.load(chunk_found_ptr + request * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    found = tl.max(chunk_found, axis=0)
    num_same = found >> 32  # pyright: ignore[reportOperatorIssue]
    begin = (found - (num_same << 32)).to(tl.int32)
    count = tl.where(num_same >= n_min, granted, 0)

    position = tl.arange(0, BLOCK_K)
    is_drafted = position < count
    # A text that repeats itself is taken to go on so.
    place = begin + position % tl.maximum(length - begin, 1)
    token_id = _token_at(text_ptr, new_ptr, num_before, place, is_drafted)
    draft_ptrs = drafts_ptr + request * stride_drafts_row + position
    tl.store(draft_ptrs, tl.where(is_drafted, token_id, -1).to(tl.int64), mask=position < k)
    tl.store(counts_ptr + request, count)

    # Nothing above reads what is written here: of the new tokens it reads `ids`.
    is_new = position < length - num_before
    token_id = tl.load(new_ptr + position, mask=is_new, other=0)
    tl.store(text_ptr + num_before + position, token_id.to(tl.int32), mask=is_new)
    tl.store(lengths_ptr + row, length.to(tl.int64), mask=num_new > 0)


def ngram_drafts(
    ids: Tensor,
    rows: Tensor,
    num_granted: Tensor,
    texts: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    counts: Tensor,
    n_min: int,
    n_max: int,
) -> None:
    """Append what came of a round to the texts of its rows, and draft what followed when their ends occurred before.

    Of the longest end of a text, of n_max down to n_min tokens, that occurred before with a token behind it, the last such
    place counts; what follows there is the draft, from its beginning again where it reaches the text's end. That is prompt
    lookup (Saxena 2023, "Prompt lookup decoding"). With T the text and e a place in it, `same(e)` the largest n up to n_max
    for which `T[e - n : e] = T[len(T) - n :]`, and b the largest e of those with the largest same(e):
    `drafts[r, i] = T[b + i % (len(T) - b)]`, if same(b) is n_min or more. Two launches: one looks at chunks of the texts,
    whose number follows from max_len alone, and one joins them.

    Args:
        ids: int64 [num_rows, 2 * k + 3], strides (any, 1), as `verify_chain` leaves them
        rows: int64 [num_rows], stride (1,), below num_texts; only those that are granted nothing may share one
        num_granted: int64 [num_rows], stride (1,), 0 to k, tokens of a draft that is found; 0: nothing is appended or looked up
        texts: int32 [num_texts, max_len], strides (any, 1), max_len at least 1; mutated
        lengths: int64 [num_texts], stride (1,), tokens of each text; what would lie behind max_len is dropped; mutated
        drafts: int64 [num_rows, k], strides (any, 1); written, -1 where nothing is drafted
        counts: int64 [num_rows], stride (1,); written, `num_granted` or, where nothing was found, 0
        n_min, n_max: shortest and longest end that is looked up, 1 <= n_min <= n_max
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or n_min, n_max. Values are not read, hence not checked.
    """
    device = ids.device
    check_tensor("rows", rows, (None,), torch.int64, device)
    num_rows = rows.numel()
    check_tensor("num_granted", num_granted, (num_rows,), torch.int64, device)
    check_tensor("drafts", drafts, (num_rows, None), torch.int64, device)
    k = drafts.shape[1]
    if k == 0:
        raise ValueError("drafts has 0 columns; at least 1 is expected")
    check_tensor("ids", ids, (num_rows, 2 * k + 3), torch.int64, device)
    check_tensor("counts", counts, (num_rows,), torch.int64, device)
    check_tensor("texts", texts, (None, None), torch.int32, device)
    num_texts, max_len = texts.shape
    if max_len == 0:
        raise ValueError("texts has 0 columns; at least 1 is expected")
    check_tensor("lengths", lengths, (num_texts,), torch.int64, device)
    if not 1 <= n_min <= n_max:
        raise ValueError(f"n_min is {n_min} and n_max {n_max}; expected 1 <= n_min <= n_max")
    if num_rows == 0:
        return
    num_chunks = triton.cdiv(max_len, BLOCK)
    chunk_found = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    _find_in_chunk_kernel[(num_rows, num_chunks)](
        chunk_found,
        ids,
        rows,
        num_granted,
        texts,
        lengths,
        ids.stride(0),
        texts.stride(0),
        max_len,
        num_chunks,
        k,
        n_max,
        BLOCK=BLOCK,
        num_warps=8,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    _draft_from_text_kernel[(num_rows,)](
        texts,
        lengths,
        drafts,
        counts,
        chunk_found,
        ids,
        rows,
        num_granted,
        ids.stride(0),
        texts.stride(0),
        drafts.stride(0),
        max_len,
        num_chunks,
        k,
        n_min,
        BLOCK_K=triton.next_power_of_2(k + 1),
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
    )
