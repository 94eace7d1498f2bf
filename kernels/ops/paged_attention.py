"""Causal attention over the paged KV cache, in Triton: any mix of query lengths in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.arrivals import arrival_counters
from kernels.ops.attention_tiles import MIN_KEYS, TileSizes, choose_num_splits, tile_sizes
from kernels.ops.checks import as_bytes, check_attention, check_tensor, check_trees
from kernels.ops.key_loop import attend_keys, key_share, load_block_ids
from kernels.ops.pdl import supports_pdl
from kernels.ops.split_sums import add_up, is_last
from kernels.ops.tree_mask import NO_TREE, within_window


# Not a kernel for each size of a batch, width and alignment of its table, which change from step to step.
@triton.jit(
    do_not_specialize=["num_reqs", "stride_block_table_req"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "tree_mask_ptr",
        "tree_starts_ptr",
    ],
)
def _paged_attention_kernel(
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
    query_start_loc_ptr,
    seq_lens_ptr,
    tree_mask_ptr,
    tree_starts_ptr,
    num_reqs,
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
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of a request's query rows, one KV head and one share of the keys per program, with an online softmax.

    The online softmax is Milakov and Gimelshein's (2018), its use over tiles of keys FlashAttention's (Dao et al., 2022).
    That a flat list of tiles can be dealt to requests without their lengths being known on the host is taken from
    vLLM's unified attention: request r owns the tiles from `query_start_loc[r] // BLOCK_Q + r` on, which leaves each
    room for all of its rows, and the tiles left over exit at once.

    With splits the keys of a tile are cut into that many shares of equal length at most, none shorter than MIN_KEYS, as in
    `paged_decode_attention`: programs without a share exit, and of several the one that arrives last adds up.

    AHEAD, where tiles are short: the first keys' blocks are looked up before the kernel before this one has ended, and others
    while the keys before them are attended to.

    Rows that are nodes of a tree of drafts mask its keys by their ancestors' bits, as in SpecInfer (Miao et al., 2024).

    Grid: (num_tokens // BLOCK_Q + num_reqs, num_kv_heads, NUM_SPLITS).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    # int64, as everything that is multiplied by a cache's strides: a pool passes 2^31 elements.
    kv_head = tl.program_id(1).to(tl.int64)
    # The last request whose tiles begin at or before this one.
    request = 0
    end_request = num_reqs
    while end_request - request > 1:
        middle = (request + end_request) // 2
        begins_later = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle > tile
        request = tl.where(begins_later, request, middle)
        end_request = tl.where(begins_later, middle, end_request)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_row = (tile - query_start // BLOCK_Q - request) * BLOCK_Q
    num_computed = tl.load(seq_lens_ptr + request) - query_len
    last_end = num_computed + tl.minimum(first_row + BLOCK_Q, query_len)
    block_ids_ptr = block_table_ptr + request * stride_block_table_req
    next_block_id = tl.zeros([BLOCK_N], dtype=tl.int32)
    if AHEAD:
        begin, end, _ = key_share(0, last_end, tl.program_id(2), NUM_SPLITS, MIN_KEYS, BLOCK_N)
        next_block_id = load_block_ids(block_ids_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if first_row >= query_len:
        return

    # -- rows: BLOCK_Q tokens x GROUP heads, the heads of a token side by side
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    token = first_row + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_place = num_computed + token
    row_mask = (row < BLOCK_Q * GROUP) & (token < query_len)
    column_mask = column < HEAD_DIM
    mask = row_mask[:, None] & column_mask[None, :]
    token_index = (query_start + token).to(tl.int64)
    query_offset = token_index * stride_query_token + head * stride_query_head
    query = tl.load(query_ptr + query_offset[:, None] + column[None, :], mask=mask, other=0.0)

    # -- where rows stand: at their place, or as deep in a tree as they have ancestors
    position = row_place
    tree_bits = None
    tree_start = None
    if tree_mask_ptr is not None:
        tree_start = tl.load(tree_starts_ptr + request)
        is_tree = tl.load(tree_mask_ptr + query_start) != NO_TREE
        tree_bits = tl.load(tree_mask_ptr + token_index, mask=row_mask, other=NO_TREE)
        if WINDOW is not None:
            position, tree_bits = within_window(tree_bits, row_place, tree_start, WINDOW)

    # -- keys: what any row of the tile may see
    begin = 0
    if WINDOW is not None:
        first_position = num_computed + first_row
        if tree_mask_ptr is not None:
            first_position = tl.where(is_tree, tree_start, first_position)
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    begin, end, num_shares = key_share(begin, last_end, tl.program_id(2), NUM_SPLITS, MIN_KEYS, BLOCK_N)
    if tl.program_id(2) >= num_shares:
        return
    # Whole tiles of keys that every row sees need no mask; with a window there is no telling, so there are none.
    unmasked_end = begin
    if WINDOW is None:
        num_common = num_computed + first_row + 1
        if tree_mask_ptr is not None:
            num_common = tl.where(is_tree, tree_start, num_common)
        unmasked_end = tl.minimum(num_common // BLOCK_N * BLOCK_N, end)
        unmasked_end = tl.maximum(unmasked_end, begin)
    key_head_ptr = key_cache_ptr + kv_head * stride_key_cache_head
    value_head_ptr = value_cache_ptr + kv_head * stride_value_cache_head
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e)), and exp2 is what the hardware has
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max, row_sum, attended, next_block_id = attend_keys(
        row_max,
        row_sum,
        attended,
        query,
        row_place,
        begin,
        unmasked_end,
        end,
        position,
        tree_bits,
        tree_start,
        block_ids_ptr,
        key_head_ptr,
        value_head_ptr,
        key_scales_ptr,
        value_scales_ptr,
        scale_log2,
        next_block_id,
        stride_key_cache_block,
        stride_key_cache_slot,
        stride_value_cache_block,
        stride_value_cache_slot,
        HEAD_DIM,
        BLOCK_SIZE,
        WINDOW,
        FORMAT,
        BLOCK_N,
        BLOCK_D,
        AHEAD,
        False,
    )
    row_max, row_sum, attended, next_block_id = attend_keys(
        row_max,
        row_sum,
        attended,
        query,
        row_place,
        unmasked_end,
        end,
        end,
        position,
        tree_bits,
        tree_start,
        block_ids_ptr,
        key_head_ptr,
        value_head_ptr,
        key_scales_ptr,
        value_scales_ptr,
        scale_log2,
        next_block_id,
        stride_key_cache_block,
        stride_key_cache_slot,
        stride_value_cache_block,
        stride_value_cache_slot,
        HEAD_DIM,
        BLOCK_SIZE,
        WINDOW,
        FORMAT,
        BLOCK_N,
        BLOCK_D,
        AHEAD,
        True,
    )

    if NUM_SPLITS > 1:  # noqa: SIM102  (without splits there is no number of shares to ask for)
        if num_shares > 1:
            # -- leave this share's part: [num_tiles, num_kv_heads, NUM_SPLITS, BLOCK_M (, BLOCK_D)]
            place = tile * tl.num_programs(1) + kv_head
            part = (place * NUM_SPLITS + tl.program_id(2)) * BLOCK_M + row
            tl.store(partial_ptr + part[:, None] * BLOCK_D + column[None, :], attended, mask=row_mask[:, None])
            tl.store(partial_max_ptr + part, row_max, mask=row_mask)
            tl.store(partial_sum_ptr + part, row_sum, mask=row_mask)
            if not is_last(arrivals_ptr + place, num_shares):
                return
            first = place * NUM_SPLITS * BLOCK_M + row
            row_max, row_sum, attended = add_up(
                partial_ptr,
                partial_max_ptr,
                partial_sum_ptr,
                first,
                BLOCK_M,
                num_shares,
                row_mask,
                NUM_SPLITS,
                CHUNK,
                BLOCK_D,
            )

    output_offset = token_index * stride_output_token + head * stride_output_head
    # A padding row has no keys: zeros, not 0 / 0.
    weight = tl.where(row_sum > 0, row_sum, 1.0)  # pyright: ignore[reportOperatorIssue]
    output = (attended / weight[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + output_offset[:, None] + column[None, :], output, mask=mask)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    tree_mask: Tensor | None = None,
    tree_starts: Tensor | None = None,
    *,
    output: Tensor | None = None,
    tiles: TileSizes | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attend from each query row to its request's positions up to its own.

    `out[t, h] = softmax_j(scale * query[t, h] . k[j, h // group]) v[j, h // group]`, over the positions
    `max(0, p - window + 1) <= j <= p` of the row's request (`0 <= j <= p` without a window). Row i of request r sits at
    `p = seq_lens[r] - query_len[r] + i`; position j is at `block_table[r, j // block_size]`, offset `j % block_size`.
    Scores, softmax and sums are in fp32; the weights are rounded to `query.dtype` for their product with the values, as are
    keys and values that are stored quantized.

    With `tree_mask` a row may be a node of a tree: the keys of nodes lie from `s = tree_starts[r]` on, and of those the row
    sees the j-th if bit j of `tree_mask[t]` is set, which it is for the row itself and its ancestors, none of them behind it.
    It sees all before s, and stands at `p = s - 1 +` the number of its bits, nodes it sees one position each: a window counts
    those.

    Args:
        query: float32, bfloat16 or float16 [num_tokens, num_heads, head_dim], strides (any, any, 1)
        key_cache: query.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1). With
            scales what `quantize` of `kernels.reference.kv_quantization` gives: int8, float8_e4m3fn, or uint8 with half as
            many columns
        value_cache: as key_cache
        block_table: int32 [num_reqs, max_num_blocks], strides (any, 1); entries past a request's blocks or behind its
            window are not read
        query_start_loc: int32 [num_reqs + 1], stride (1,), leading 0: the rows of request r are [r] up to [r + 1]
        seq_lens: int32 [num_reqs], stride (1,), at least the request's query_len
        scale: factor of the scores, usually head_dim ** -0.5
        window: positions a row attends to, its own included; None for all
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2], contiguous
        value_scales: as key_scales
        tree_mask: int64 [num_tokens], stride (1,); -1 for the rows of a request without a tree; None: there are no trees
        tree_starts: int32 [num_reqs], stride (1,), unused for a request without a tree; None if there are no trees
        output: where to write, query.dtype [num_tokens, num_heads, head_dim], strides (any, any, 1); a new tensor by
            default
        tiles: how to cut the launch; by default chosen from the sizes. Fixed, and with `num_splits` 1, a row's sums depend
            on its request alone.
        num_splits: shares of a tile's keys at most, a power of two; by default chosen from the sizes
    Returns:
        query.dtype [num_tokens, num_heads, head_dim]; rows past query_start_loc[-1] are unspecified. Nothing but
        `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, num_kv_heads does not divide num_heads, a group
            has more than 128 heads, head_dim is above 256, window is below 1, or one of tree_mask and tree_starts is None.
            Values on the device are not read.
    """
    group, kv_format = check_attention(query, key_cache, value_cache, window, key_scales, value_scales)
    num_tokens, _, head_dim = query.shape
    check_tensor("block_table", block_table, (None, None), torch.int32, query.device)
    num_reqs = block_table.shape[0]
    check_tensor("query_start_loc", query_start_loc, (num_reqs + 1,), torch.int32, query.device)
    check_tensor("seq_lens", seq_lens, (num_reqs,), torch.int32, query.device)
    check_trees(tree_mask, tree_starts, num_tokens, num_reqs, query.device)
    _, block_size, num_kv_heads, _ = key_cache.shape
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_tensor("output", output, tuple(query.shape), query.dtype, query.device)
    if output.numel() == 0 or num_reqs == 0:
        return output
    pdl = supports_pdl(query.device)
    tiles = tiles or tile_sizes(num_tokens, num_reqs, group, head_dim, query.element_size())
    num_tiles = num_tokens // tiles.block_q + num_reqs
    if num_splits is None:
        max_seq_len = block_table.shape[1] * block_size
        num_splits = choose_num_splits(num_tiles * num_kv_heads, max_seq_len, tiles.min_keys, query.device)
    parts = (num_tiles, num_kv_heads, num_splits, tiles.block_m) if num_splits > 1 else (0,)
    partial = torch.empty((*parts, tiles.block_d), dtype=torch.float32, device=query.device)
    partial_max, partial_sum = (torch.empty(parts, dtype=torch.float32, device=query.device) for _ in range(2))
    _paged_attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        output,
        partial,
        partial_max,
        partial_sum,
        arrival_counters(query.device, num_tiles * num_kv_heads),
        query,
        as_bytes(key_cache),
        as_bytes(value_cache),
        key_scales,
        value_scales,
        block_table,
        query_start_loc,
        seq_lens,
        tree_mask,
        tree_starts,
        num_reqs,
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
        BLOCK_Q=tiles.block_q,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=tiles.block_d,
        NUM_SPLITS=num_splits,
        MIN_KEYS=tiles.min_keys,
        CHUNK=max(1, min(num_splits, 8192 // (tiles.block_m * tiles.block_d))),
        AHEAD=tiles.min_keys < MIN_KEYS and window is None,
        PDL=pdl,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output
