"""What becomes of chains of drafts, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor
from kernels.reference.sample_nodes import SampledNodes

BLOCK = 2048


@triton.jit
def _is_finite(largest):
    return tl.abs(largest) < float("inf")


@triton.jit
def _shift(largest):
    """What exponentials are relative to; not to an infinity, for that would be NaN."""
    return tl.where(_is_finite(largest), largest, 0.0)


@triton.jit
def _verify_chunk_kernel(
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_token_ids_ptr,
    logits_ptr,
    stride_logits_row,
    vocab_size,
    num_chunks,
    BLOCK: tl.constexpr,
):
    """The maximum of BLOCK logits, NaN if one is, the lowest id that has it, and the sum of exponentials relative to it.

    Grid: (num_rows * (k + 1), num_chunks).
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits_row + column, mask=mask, other=float("-inf"))
    is_nan = logits != logits
    logits = tl.where(is_nan, float("-inf"), logits)
    largest = tl.max(logits, axis=0)
    token_id = tl.min(tl.where(mask & (logits == largest), column, vocab_size - 1), axis=0)
    total = tl.sum(tl.exp(logits - _shift(largest)), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0)
    place = row * num_chunks + chunk
    tl.store(chunk_max_ptr + place, tl.where(has_nan == 0, largest, float("nan")))
    tl.store(chunk_sum_ptr + place, total)
    tl.store(chunk_token_ids_ptr + place, token_id)


# One kernel for every number of rows and drafts that has the same blocks.
@triton.jit(
    do_not_specialize=["num_rows", "k", "stride_draft_token_ids_row"], do_not_specialize_on_alignment=["probs_ptr"]
)
def _verify_row_kernel(
    ids_ptr,
    probs_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_token_ids_ptr,
    logits_ptr,
    draft_token_ids_ptr,
    num_draft_tokens_ptr,
    sampled_token_ids_ptr,
    sampled_probs_ptr,
    stride_logits_row,
    stride_draft_token_ids_row,
    vocab_size,
    num_chunks,
    num_rows,
    k,
    HAS_SAMPLED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The k + 1 positions of one row per program, from their chunks. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK_K)
    logits_row = row * (k + 1) + position
    chunk = tl.arange(0, BLOCK_CHUNKS)
    mask = (position <= k)[:, None] & (chunk < num_chunks)[None, :]
    place = logits_row[:, None] * num_chunks + chunk[None, :]
    chunk_max = tl.load(chunk_max_ptr + place, mask=mask, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + place, mask=mask, other=0.0)
    chunk_token_id = tl.load(chunk_token_ids_ptr + place, mask=mask, other=0)

    is_nan = chunk_max != chunk_max
    largest = tl.max(tl.where(is_nan, float("-inf"), chunk_max), axis=1)
    has_nan = tl.max(is_nan.to(tl.int32), axis=1)
    has_largest = mask & (chunk_max == tl.expand_dims(largest, 1))
    token_id = tl.min(tl.where(has_largest, chunk_token_id, vocab_size - 1), axis=1).to(tl.int64)
    is_finite = (has_nan == 0) & _is_finite(largest)
    shift = _shift(largest)
    total = tl.sum(chunk_sum * tl.exp(chunk_max - tl.expand_dims(shift, 1)), axis=1)

    is_draft = position < k
    is_drafted = position < tl.load(num_draft_tokens_ptr + row)
    draft_ptrs = draft_token_ids_ptr + row * stride_draft_token_ids_row + position
    draft_token_id = tl.load(draft_ptrs, mask=is_draft, other=0)
    logit = tl.load(logits_ptr + logits_row * stride_logits_row + draft_token_id, mask=is_drafted, other=float("-inf"))
    target_prob = tl.where(is_drafted, tl.exp(logit - shift) / tl.where(is_drafted, total, 1.0), 0.0)
    if HAS_SAMPLED:
        sampled = tl.load(sampled_token_ids_ptr + logits_row, mask=position <= k, other=-1)
        is_sampled = sampled >= 0
        token_id = tl.where(is_sampled, sampled, token_id)
        sampled_prob = tl.load(sampled_probs_ptr + row * k + position, mask=is_drafted & is_sampled, other=0.0)
        target_prob = tl.where(is_sampled, sampled_prob, target_prob)
    is_accepted = is_drafted & (draft_token_id == token_id)
    accept_prob = tl.where(is_accepted, 1.0, 0.0)
    if HAS_SAMPLED:
        accept_prob = tl.where(is_sampled, sampled_prob, accept_prob)
    num_accepted = tl.min(tl.where(is_accepted & is_finite, k, position), axis=0)
    last = tl.sum(tl.where(position == num_accepted, token_id, 0), axis=0)
    is_usable = tl.min((is_finite | (position > num_accepted)).to(tl.int32), axis=0)

    begin = ids_ptr + row * (2 * k + 3)
    result = tl.where(position < num_accepted, draft_token_id, tl.where(position == num_accepted, last, -1))
    tl.store(begin + position, result, mask=position <= k)
    tl.store(begin + k + 1, num_accepted.to(tl.int64))
    tl.store(begin + k + 2, is_usable.to(tl.int64))
    tl.store(begin + k + 3 + position, draft_token_id, mask=is_draft)
    prob_ptrs = probs_ptr + row * k + position
    tl.store(prob_ptrs, target_prob, mask=is_draft)
    tl.store(prob_ptrs + num_rows * k, accept_prob, mask=is_draft)
    tl.store(prob_ptrs + 2 * num_rows * k, tl.where(is_drafted, 1.0, 0.0), mask=is_draft)


def likeliest_of_chunks(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first launch of a verification, over float32 [num_rows, vocab_size], strides (any, 1), at least one column.

    Of each chunk of BLOCK columns: its maximum, NaN if it holds one, and the sum of exponentials below that, float32 [num_rows,
    num_chunks] each; and the lowest id that has the maximum, int32.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, BLOCK)
    chunk_max = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_sum = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_token_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    _verify_chunk_kernel[(num_rows, num_chunks)](
        chunk_max,
        chunk_sum,
        chunk_token_ids,
        logits,
        logits.stride(0),
        vocab_size,
        num_chunks,
        BLOCK=BLOCK,
        num_warps=4,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    return chunk_max, chunk_sum, chunk_token_ids


def verify_chain(
    logits: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor, sampled: SampledNodes | None = None
) -> tuple[Tensor, Tensor]:
    """Accept each row's drafts as far as they are the target's own tokens, and add the one behind them.

    The target's token of a position is the lowest id that has its largest logit, which has to be finite; or of a sampled row
    what `sample_nodes` has drawn. A draft is accepted if it is that token and all before it are accepted. The last token is
    the target's behind those. Two launches: one pass over the logits, in chunks that follow
    from the vocabulary alone, and one that joins them.

    Args:
        logits: float32 [num_rows * (k + 1), vocab_size], strides (any, 1), k at least 1
        draft_token_ids: int64 [num_rows, k], strides (any, 1), below vocab_size
        num_draft_tokens: int64 [num_rows], stride (1,), 0 to k; positions from there on are padding, whatever they hold
        sampled: of `sample_nodes` over these chains, contiguous; None: all rows are greedy
    Returns:
        packed: uint8 [num_rows * (28 * k + 24)]: `ids`, and behind them float32 [3, num_rows, k]: of each drafted token its
            probability, of a greedy row at temperature 1, with which it is accepted once it is reached, of a greedy row 1 or
            0, and 1; of padding 0.
        ids: int64 [num_rows, 2 * k + 3], a view. In each row k + 1 columns with the accepted tokens, the last one and -1
            behind it; how many were accepted; 1, or 0 where a position that was needed has a NaN or no finite maximum, and
            then the last token is some id of the vocabulary; and `draft_token_ids`.
        Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or the vocabulary is empty. Values are not read, hence
            not checked.
    """
    num_rows = num_draft_tokens.numel()
    check_tensor("num_draft_tokens", num_draft_tokens, (num_rows,), torch.int64, logits.device)
    check_tensor("draft_token_ids", draft_token_ids, (num_rows, None), torch.int64, logits.device)
    k = draft_token_ids.shape[1]
    if k == 0:
        raise ValueError("draft_token_ids has 0 columns; at least 1 is expected")
    check_tensor("logits", logits, (num_rows * (k + 1), None), torch.float32, logits.device)
    vocab_size = logits.shape[1]
    if vocab_size == 0:
        raise ValueError("logits has 0 columns; at least 1 is expected")
    if sampled is not None:
        check_sampled(sampled, num_rows, k + 1, logits.device)

    num_bytes = 8 * num_rows * (2 * k + 3)
    packed = torch.empty((num_bytes + 12 * num_rows * k,), dtype=torch.uint8, device=logits.device)
    ids = packed[:num_bytes].view(torch.int64).view(num_rows, 2 * k + 3)
    if num_rows == 0:
        return packed, ids
    chunk_max, chunk_sum, chunk_token_ids = likeliest_of_chunks(logits)
    num_chunks = chunk_max.shape[1]
    _verify_row_kernel[(num_rows,)](
        ids,
        packed[num_bytes:].view(torch.float32),
        chunk_max,
        chunk_sum,
        chunk_token_ids,
        logits,
        draft_token_ids,
        num_draft_tokens,
        None if sampled is None else sampled.token_ids,
        None if sampled is None else sampled.probs,
        logits.stride(0),
        draft_token_ids.stride(0),
        vocab_size,
        num_chunks,
        num_rows,
        k,
        HAS_SAMPLED=sampled is not None,
        BLOCK_K=triton.next_power_of_2(k + 1),
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    return packed, ids


def check_sampled(sampled: SampledNodes, num_rows: int, num_nodes: int, device: torch.device) -> None:
    """That it is contiguous and of so many rows and nodes. Raises `ValueError`."""
    check_tensor("sampled.token_ids", sampled.token_ids, (num_rows, num_nodes), torch.int64, device)
    check_tensor("sampled.probs", sampled.probs, (num_rows, num_nodes - 1), torch.float32, device)
    for name, tensor in sampled._asdict().items():
        if not tensor.is_contiguous():
            raise ValueError(f"sampled.{name} has strides {list(tensor.stride())}; expected it contiguous")
