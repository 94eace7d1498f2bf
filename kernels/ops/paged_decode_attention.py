"""Attention of one query row per request over the paged KV cache, in Triton: the keys of a request split over programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.arrivals import arrival_counters
from kernels.ops.checks import as_bytes, check_attention, check_tensor
from kernels.ops.decode_cut import MAX_TEAM, Cut, choose_cut
from kernels.ops.kv_quantization import load_keys_and_values
from kernels.ops.pdl import supports_pdl
from kernels.ops.split_sums import add_up, is_last


# Not a kernel for each width and alignment of the table, which change from step to step.
@triton.jit(
    do_not_specialize=["stride_block_table_req"], do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr"]
)
def _paged_decode_attention_kernel(
    output_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    arrivals_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    seq_lens_ptr,
    scale,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    stride_block_table_req,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TEAM: tl.constexpr,
    BLOCK_TEAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head, one share of its keys and one request per program, with an online softmax (see `paged_attention`).

    A request is cut into as many shares of equal length as there are splits, but none shorter than MIN_KEYS: programs
    without a share exit at once. Each share leaves its unnormalised sum, its maximum and its weight in the partial
    tensors. Of every TEAM shares that follow each other, the program that arrives last at the team's counter adds them up,
    and of the teams the last one those (split-KV, after Dao et al., "Flash-Decoding", 2023; counters in place of a second
    kernel, and two short levels, for all that is read at once arrives in one trip to the L2). Counters end at 0 again.

    Grid: (num_kv_heads, NUM_SPLITS, num_reqs).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # int64, as everything that is multiplied by a cache's strides: a pool passes 2^31 elements.
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(seq_len - WINDOW, 0)
    num_keys = tl.maximum((seq_len - begin + NUM_SPLITS - 1) // NUM_SPLITS, MIN_KEYS)
    num_keys = (num_keys + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    num_shares = tl.maximum((seq_len - begin + num_keys - 1) // num_keys, 1)
    first_key = begin + split * num_keys + tl.arange(0, BLOCK_N)
    block_ids_ptr = block_table_ptr + request * stride_block_table_req
    next_block_id = tl.load(block_ids_ptr + first_key // BLOCK_SIZE, mask=first_key < seq_len, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if split >= num_shares:
        return

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    query_offset = request * stride_query_token + head * stride_query_head
    query = tl.load(query_ptr + query_offset[:, None] + column[None, :], mask=mask, other=0.0)

    begin += split * num_keys
    end = tl.minimum(begin + num_keys, seq_len)
    key_head_ptr = key_cache_ptr + kv_head * stride_key_cache_head
    value_head_ptr = value_cache_ptr + kv_head * stride_value_cache_head
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e)), and exp2 is what the hardware has
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for key_start in range(begin, end, BLOCK_N):
        key_position = key_start + tl.arange(0, BLOCK_N)
        # Slots past the end may hold anything, NaN included, which no weight of zero would undo: they are not loaded.
        key_mask = key_position < end
        block_id = next_block_id.to(tl.int64)
        next_position = key_position + BLOCK_N
        next_block_id = tl.load(block_ids_ptr + next_position // BLOCK_SIZE, mask=next_position < end, other=0)
        slot = key_position % BLOCK_SIZE
        key_offset = block_id * stride_key_cache_block + slot * stride_key_cache_slot
        value_offset = block_id * stride_value_cache_block + slot * stride_value_cache_slot
        key_ptrs = key_head_ptr + key_offset[None, :] + column[:, None]
        value_ptrs = value_head_ptr + value_offset[:, None] + column[None, :]
        if FORMAT is not None:
            vector = (block_id * BLOCK_SIZE + slot) * tl.num_programs(0) + kv_head
            key, value = load_keys_and_values(
                key_head_ptr,
                value_head_ptr,
                key_scales_ptr,
                value_scales_ptr,
                key_offset,
                value_offset,
                vector,
                key_mask,
                column,
                HEAD_DIM,
                FORMAT,
                query.dtype,
            )
        elif HEAD_DIM == BLOCK_D:
            key = tl.load(key_ptrs, mask=key_mask[None, :], other=0.0)
            value = tl.load(value_ptrs, mask=key_mask[:, None], other=0.0)
        else:
            key = tl.load(key_ptrs, mask=key_mask[None, :] & (column < HEAD_DIM)[:, None], other=0.0)
            value = tl.load(value_ptrs, mask=key_mask[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        # "ieee": float32 products are not to be rounded to TF32; other dtypes ignore it.
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        scores = tl.where(key_mask[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        attended = attended * rescale[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
        row_max = new_max

    output_offset = request * stride_output_token + head * stride_output_head
    if num_shares == 1:
        # A padding row has no keys: zeros, not 0 / 0.
        output = attended / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(
            output_ptr + output_offset[:, None] + column[None, :], output.to(output_ptr.dtype.element_ty), mask=mask
        )
        return

    # -- leave this share's part: [num_reqs, num_kv_heads, GROUP, NUM_SPLITS (, BLOCK_D)]
    first = (request * tl.num_programs(0) + kv_head) * GROUP * NUM_SPLITS
    part = first + row * NUM_SPLITS + split
    row_mask = row < GROUP
    tl.store(partial_ptr + part[:, None] * BLOCK_D + column[None, :], attended, mask=row_mask[:, None])
    tl.store(partial_max_ptr + part, row_max, mask=row_mask)
    tl.store(partial_sum_ptr + part, row_sum, mask=row_mask)

    # -- add up: the shares of each team, then the teams
    NUM_TEAMS: tl.constexpr = NUM_SPLITS // TEAM
    counters_ptr = arrivals_ptr + (request * tl.num_programs(0) + kv_head) * (NUM_TEAMS + 1)
    team = split // TEAM
    num_members = tl.minimum(num_shares - team * TEAM, TEAM)
    if not is_last(counters_ptr + team, num_members):
        return
    member = tl.arange(0, BLOCK_G)
    parts = first + member * NUM_SPLITS
    total_max, total_sum, total = add_up(
        partial_ptr,
        partial_max_ptr,
        partial_sum_ptr,
        parts + team * TEAM,
        1,
        num_members,
        member < GROUP,
        TEAM,
        CHUNK,
        BLOCK_D,
    )
    num_teams = (num_shares + TEAM - 1) // TEAM
    if num_teams > 1:
        # In place of the team's first share, which nobody else reads.
        team_part = parts + team * TEAM
        tl.store(partial_ptr + team_part[:, None] * BLOCK_D + column[None, :], total, mask=(member < GROUP)[:, None])
        tl.store(partial_max_ptr + team_part, total_max, mask=member < GROUP)
        tl.store(partial_sum_ptr + team_part, total_sum, mask=member < GROUP)
        if not is_last(counters_ptr + NUM_TEAMS, num_teams):
            return
        total_max, total_sum, total = add_up(
            partial_ptr,
            partial_max_ptr,
            partial_sum_ptr,
            parts,
            TEAM,
            num_teams,
            member < GROUP,
            BLOCK_TEAMS,
            CHUNK,
            BLOCK_D,
        )
    output = total / tl.where(member < GROUP, total_sum, 1.0)[:, None]
    output_ptrs = (
        output_ptr
        + request * stride_output_token
        + (kv_head * GROUP + member)[:, None] * stride_output_head
        + column[None, :]
    )
    mask = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=mask)


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    output: Tensor | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """Attend from the last position of each request to all of it: `paged_attention` with one query row per request.

    `out[r, h] = softmax_j(scale * query[r, h] . k[j, h // group]) v[j, h // group]`, over the positions
    `max(0, seq_lens[r] - window) <= j < seq_lens[r]` of request r (from 0 without a window).

    Args:
        query: float32, bfloat16 or float16 [num_reqs, num_heads, head_dim], strides (any, any, 1)
        key_cache: query.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1). With
            scales what `quantize` of `kernels.reference.kv_quantization` gives: int8, float8_e4m3fn, or uint8 with half as
            many columns
        value_cache: as key_cache
        block_table: int32 [num_reqs, max_num_blocks], strides (any, 1); entries past a request's blocks or behind its
            window are not read
        seq_lens: int32 [num_reqs], stride (1,); 0 for a padding row, whose output is 0
        scale: factor of the scores, usually head_dim ** -0.5
        window: positions a row attends to, its own included; None for all
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2], contiguous
        value_scales: as key_scales
        output: where to write, query.dtype [num_reqs, num_heads, head_dim], strides (any, any, 1); a new tensor by default
        cut: how to cut the launch; by default chosen from the sizes. A row's sums depend on it and on the row's own
            length only.
    Returns:
        query.dtype [num_reqs, num_heads, head_dim]. Nothing but `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, num_kv_heads does not divide num_heads, a group
            has more than 128 heads, head_dim is above 256, or window is below 1.
    """
    group, kv_format = check_attention(query, key_cache, value_cache, window, key_scales, value_scales)
    num_reqs, _, head_dim = query.shape
    check_tensor("block_table", block_table, (num_reqs, None), torch.int32, query.device)
    check_tensor("seq_lens", seq_lens, (num_reqs,), torch.int32, query.device)
    _, block_size, num_kv_heads, _ = key_cache.shape
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_tensor("output", output, tuple(query.shape), query.dtype, query.device)

    if output.numel() == 0:
        return output
    cut = cut or choose_cut(num_reqs * num_kv_heads, block_table.shape[1] * block_size, head_dim, query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_g = triton.next_power_of_2(group)
    parts = (num_reqs, num_kv_heads, group, cut.num_splits) if cut.num_splits > 1 else (0,)
    partial = torch.empty((*parts, block_d), dtype=torch.float32, device=query.device)
    partial_max, partial_sum = (torch.empty(parts, dtype=torch.float32, device=query.device) for _ in range(2))
    team = min(cut.num_splits, MAX_TEAM)
    counters = num_reqs * num_kv_heads * (cut.num_splits // team + 1)
    pdl = supports_pdl(query.device)
    _paged_decode_attention_kernel[(num_kv_heads, cut.num_splits, num_reqs)](
        output,
        partial,
        partial_max,
        partial_sum,
        arrival_counters(query.device, counters),
        query,
        as_bytes(key_cache),
        as_bytes(value_cache),
        key_scales,
        value_scales,
        block_table,
        seq_lens,
        scale,
        output.stride(0),
        output.stride(1),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        FORMAT=kv_format,
        NUM_SPLITS=cut.num_splits,
        MIN_KEYS=cut.min_keys,
        BLOCK_M=max(16, block_g),  # tl.dot wants 16 rows at least
        BLOCK_N=cut.block_n,
        BLOCK_D=block_d,
        BLOCK_G=block_g,
        TEAM=team,
        BLOCK_TEAMS=triton.next_power_of_2(cut.num_splits // team),
        CHUNK=max(1, min(team, 4096 // (block_g * block_d))),
        PDL=pdl,
        num_warps=cut.num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        num_stages=cut.num_stages,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output
