"""One token per row by temperature, top-k and top-p, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor
from kernels.ops.greedy_tokens import greedy_tokens
from kernels.ops.threshold import NUMBERS, WEIGHTS, find_threshold
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE

# Logits per iteration, a power of two that follows from the vocabulary alone: a row is summed in the same order always.
MIN_BLOCK, MAX_BLOCK = 256, 4096
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * log2(e)), and exp2 is what the hardware has


@triton.jit
def _amounts(logits, column, largest, exponent_scale, threshold, last_equal_id, BY_COUNT: tl.constexpr):
    """Float64: 1 for logits at the threshold (`BY_COUNT`), or the weights of those kept."""
    is_equal = logits == threshold
    if BY_COUNT:
        amounts = tl.where(is_equal, 1.0, 0.0)
    else:
        is_kept = (logits > threshold) | (is_equal & (column <= last_equal_id))
        amounts = tl.where(is_kept, tl.exp2((logits - largest) * exponent_scale), 0.0)
    return amounts.to(tl.float64)


@triton.jit
def _first_past(
    logits_ptr,
    vocab_size,
    largest,
    exponent_scale,
    threshold,
    last_equal_id,
    target,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_NUM_BLOCKS: tl.constexpr,
):
    """The first id whose amount, summed with those before it, exceeds the target (without `BY_COUNT` a share of the sum).

    It has an amount above zero; where rounding leaves the sum at the target it is the last that has. One pass for the
    sums of blocks, then the block in question again. And the sum, float64.
    """
    lane = tl.arange(0, BLOCK)
    block = tl.arange(0, MAX_NUM_BLOCKS)
    block_sums = tl.zeros([MAX_NUM_BLOCKS], dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK):
        column = start + lane
        logits = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf"))
        amounts = _amounts(logits, column, largest, exponent_scale, threshold, last_equal_id, BY_COUNT)
        block_sums = tl.where(block == start // BLOCK, tl.sum(amounts, axis=0), block_sums)
    sums = tl.cumsum(block_sums, axis=0)
    total = tl.max(sums, axis=0)
    if not BY_COUNT:
        target = target * total
    first_block = tl.min(tl.where((sums > target) & (block_sums > 0), block, MAX_NUM_BLOCKS), axis=0)
    first_block = tl.minimum(first_block, tl.max(tl.where(block_sums > 0, block, 0), axis=0))
    before = tl.max(tl.where(block < first_block, sums, 0.0), axis=0)

    column = first_block * BLOCK + lane
    logits = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf"))
    amounts = _amounts(logits, column, largest, exponent_scale, threshold, last_equal_id, BY_COUNT)
    is_past = (before + tl.cumsum(amounts, axis=0) > target) & (amounts > 0)
    first = tl.min(tl.where(is_past, column, vocab_size), axis=0)
    return tl.minimum(first, tl.max(tl.where(amounts > 0, column, 0), axis=0)), total


@triton.jit
def draw_token(
    logits_ptr,
    vocab_size,
    largest,
    temperature,
    top_k,
    top_p,
    draw,
    LOG2_E: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_NUM_BLOCKS: tl.constexpr,
):
    """The token that a draw gives, by temperature, top-k and top-p, of a row whose largest logit is finite.

    Returns:
        It; the threshold and the last id of those that equal it and are kept, with all above the threshold; and the float64 sum
        of the weights kept, `exp2((logit - largest) * LOG2_E / temperature)`.
    """
    exponent_scale = LOG2_E / temperature
    # Kept are the logits above the threshold, and of those that equal it the first `num_kept`.
    threshold = float("-inf")
    num_equal = 0.0
    num_kept = tl.full([], 0.0, dtype=tl.float64)
    no_amount = tl.full([], 0.0, dtype=tl.float64)

    if (top_k > 0) & (top_k < vocab_size):
        number = top_k.to(tl.float64)
        threshold, above, _, num_equal = find_threshold(
            logits_ptr, vocab_size, largest, exponent_scale, 1.0, threshold, no_amount, number, NUMBERS, BLOCK
        )
        num_kept = number - above

    if top_p < 1.0:
        floor = threshold
        at_floor = num_kept * tl.exp2((floor - largest) * exponent_scale).to(tl.float64)
        threshold, above, target, num_found = find_threshold(
            logits_ptr,
            vocab_size,
            largest,
            exponent_scale,
            temperature,
            floor,
            at_floor,
            top_p.to(tl.float64),
            WEIGHTS,
            BLOCK,
        )
        weight = tl.exp2((threshold - largest) * exponent_scale).to(tl.float64)
        num_reaching = tl.maximum(tl.ceil((target - above) / weight), 1.0)
        if threshold == floor:
            num_kept = tl.minimum(num_kept, num_reaching)
        else:
            num_kept = num_reaching
            num_equal = num_found

    last_equal_id = vocab_size
    if num_kept < num_equal:
        last_equal_id, _ = _first_past(
            logits_ptr,
            vocab_size,
            largest,
            exponent_scale,
            threshold,
            vocab_size,
            num_kept - 1.0,
            NUMBERS,
            BLOCK,
            MAX_NUM_BLOCKS,
        )
    token_id, total = _first_past(
        logits_ptr,
        vocab_size,
        largest,
        exponent_scale,
        threshold,
        last_equal_id,
        draw,
        WEIGHTS,
        BLOCK,
        MAX_NUM_BLOCKS,
    )
    return token_id, threshold, last_equal_id, total


# A step's parameters lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "draws_ptr"])
def _sample_tokens_kernel(
    token_ids_ptr,
    finite_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    draws_ptr,
    stride_logits_row,
    vocab_size,
    GREEDY_TEMPERATURE: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_NUM_BLOCKS: tl.constexpr,
):
    """One row per program: the greedy token stands there already, and stays unless the row is to be sampled.

    Grid: (num_rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if (temperature < GREEDY_TEMPERATURE) | (tl.load(finite_ptr + row) == 0):
        return
    logits_ptr += row * stride_logits_row
    largest = tl.load(logits_ptr + tl.load(token_ids_ptr + row))
    token_id, _, _, _ = draw_token(
        logits_ptr,
        vocab_size,
        largest,
        temperature,
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
        tl.load(draws_ptr + row),
        LOG2_E,
        BLOCK,
        MAX_NUM_BLOCKS,
    )
    tl.store(token_ids_ptr + row, token_id)


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw each row's token from its filtered distribution; greedy rows take the largest logit, the lowest id among equals.

    A token weighs `exp((logit - largest) / temperature)`, in fp32: relative to the row's largest no exponential overflows.
    Top-k keeps the k largest logits, of equal ones the lowest ids. Top-p, on what top-k left, goes through the tokens in
    that same order and keeps one while the weights before it have not reached `top_p` of their sum, so at least one. The
    draw inverts the cumulative distribution of the tokens kept, in order of id, with sums in float64: the first token
    whose cumulative weight exceeds `draw` of the sum, never one of weight zero. A row depends on its own values alone.

    Nothing is sorted. After one pass for the largest logits (`greedy_tokens`), a filter searches for the logit where it
    ends by passes over its row that sum up from four pivots at once: two bits a pass, about ten for a vocabulary of 128
    thousand and at most 23. One more pass if logits that equal it are kept in part, and one for the draw.

    Args:
        logits: float32 [num_rows, vocab_size], strides (any, 1)
        temperature: float32 [num_rows], stride (1,); below 1e-5 the row is greedy
        top_k: int32 [num_rows], stride (1,); below 1, or vocab_size and more: off
        top_p: float32 [num_rows], stride (1,), above 0; 1 and more: off
        draws: float64 [num_rows], stride (1,), uniform in [0, 1)
    Returns:
        token_ids int64 [num_rows], and finite bool [num_rows]: False where a logit is NaN or the largest is infinite, and
        then the token is some id of the vocabulary. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or the vocabulary is empty. Values are not checked.
    """
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    num_rows, vocab_size = logits.shape
    check_tensor("temperature", temperature, (num_rows,), torch.float32, logits.device)
    check_tensor("top_k", top_k, (num_rows,), torch.int32, logits.device)
    check_tensor("top_p", top_p, (num_rows,), torch.float32, logits.device)
    check_tensor("draws", draws, (num_rows,), torch.float64, logits.device)

    token_ids, finite = greedy_tokens(logits)
    if num_rows == 0:
        return token_ids, finite
    block, max_num_blocks, num_warps = blocks_of(vocab_size)
    _sample_tokens_kernel[(num_rows,)](
        token_ids,
        finite,
        logits,
        temperature,
        top_k,
        top_p,
        draws,
        logits.stride(0),
        vocab_size,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        LOG2_E=LOG2_E,
        BLOCK=block,
        MAX_NUM_BLOCKS=max_num_blocks,
        num_warps=num_warps,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    return token_ids, finite


def blocks_of(vocab_size: int) -> tuple[int, int, int]:
    """Of `draw_token`: logits per iteration, iterations at most, and warps."""
    block = min(max(triton.next_power_of_2(vocab_size), MIN_BLOCK), MAX_BLOCK)
    return block, triton.next_power_of_2(triton.cdiv(vocab_size, block)), min(block // MIN_BLOCK, 16)
