"""Where the tokens of a speculative round stand, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor
from kernels.reference.round_positions import RoundPositions


@triton.jit(do_not_specialize=["num_groups", "num_rows", "stride_tables_group", "stride_tables_row"])
def _round_positions_kernel(
    starts_ptr,
    sources_ptr,
    places_ptr,
    positions_ptr,
    slot_mappings_ptr,
    pass_positions_ptr,
    pass_slot_mappings_ptr,
    pass_seq_lens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    counts_ptr,
    num_computed_ptr,
    block_tables_ptr,
    num_groups,
    num_rows,
    stride_tables_group,
    stride_tables_row,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """The whole round in one program: what takes time is to get it started. Grid: (1,)."""
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    is_row = row < num_rows
    num_computed = tl.load(num_computed_ptr + row, mask=is_row, other=-1)
    count = tl.load(counts_ptr + row, mask=is_row, other=0)
    is_request = num_computed >= 0
    length = tl.where(is_request, count + 1, 0)
    end = tl.cumsum(length, axis=0)
    begin = end - length
    num_tokens = tl.sum(length, axis=0)
    tl.store(starts_ptr + row, tl.where(is_request, begin, 0), mask=is_row)
    tl.store(query_start_loc_ptr + row, begin.to(tl.int32), mask=is_row)
    tl.store(query_start_loc_ptr + row + 1, end.to(tl.int32), mask=row == num_rows - 1)
    tl.store(seq_lens_ptr + row, tl.where(is_request, num_computed + length, 0).to(tl.int32), mask=is_row)

    place = row[:, None] * WIDTH + column[None, :]
    mask = is_row[:, None] & (column < WIDTH)[None, :]
    is_token = column[None, :] < length[:, None]
    # Tokens go where their row begins, and padding behind all of them, both in the matrix's order.
    index = tl.where(is_token, begin[:, None] + column[None, :], num_tokens + place - end[:, None])
    position = tl.where(is_token, num_computed[:, None] + column[None, :], 0)
    tl.store(sources_ptr + index, tl.where(is_token, place, 0), mask=mask)
    tl.store(positions_ptr + index, position, mask=mask)
    token = begin[:, None] + tl.minimum(column[None, :], count[:, None])
    tl.store(places_ptr + place, tl.where(is_request[:, None], token, 0), mask=mask)
    by_column = column[None, :] * num_rows + row[:, None]
    tl.store(pass_positions_ptr + by_column, position, mask=mask)
    tl.store(pass_seq_lens_ptr + by_column, tl.where(is_token, position + 1, 0).to(tl.int32), mask=mask)
    entry_ptrs = block_tables_ptr + row.to(tl.int64)[:, None] * stride_tables_row + position // BLOCK_SIZE
    for group in range(num_groups):
        block = tl.load(entry_ptrs, mask=mask & is_token, other=0).to(tl.int64)
        slot = tl.where(is_token, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(slot_mappings_ptr + group * num_rows * WIDTH + index, slot, mask=mask)
        tl.store(pass_slot_mappings_ptr + group * num_rows * WIDTH + by_column, slot, mask=mask)
        entry_ptrs += stride_tables_group


def round_positions(
    counts: Tensor, num_computed: Tensor, block_tables: Tensor, width: int, block_size: int
) -> RoundPositions:
    """Lay out a round, see `RoundPositions`.

    Token c of row r, the first of them the request's last token, is at position `p = num_computed[r] + c` and in slot
    `block_tables[g, r, p // block_size] * block_size + p % block_size` of KV group g.

    Args:
        counts: int64 [num_rows], stride (1,), drafts of each row, below `width`
        num_computed: int64 [num_rows], stride (1,), tokens before each row's last one; negative for a row without a request
        block_tables: int32 [num_groups, num_rows, max_num_blocks], strides (any, any, 1)
        width: columns, at least 1
        block_size: tokens per block
    Returns:
        `RoundPositions`; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, there is no row, or width or block_size is below 1. Values
            on the device are not read.
    """
    num_rows, device = counts.numel(), counts.device
    check_tensor("counts", counts, (num_rows,), torch.int64, device)
    check_tensor("num_computed", num_computed, (num_rows,), torch.int64, device)
    check_tensor("block_tables", block_tables, (None, num_rows, None), torch.int32, device)
    if num_rows == 0:
        raise ValueError("counts has 0 rows; at least 1 is expected")
    for name, value in (("width", width), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed are 1 and more")
    num_groups, num_places = block_tables.shape[0], num_rows * width

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    found = RoundPositions(
        starts=new(num_rows),
        sources=new(num_places),
        places=new(num_rows, width),
        positions=new(num_places),
        slot_mappings=new(num_groups, num_places),
        pass_positions=new(width, num_rows),
        pass_slot_mappings=new(num_groups, width, num_rows),
        pass_seq_lens=new(width, num_rows, dtype=torch.int32),
        query_start_loc=new(num_rows + 1, dtype=torch.int32),
        seq_lens=new(num_rows, dtype=torch.int32),
    )
    _round_positions_kernel[(1,)](
        *found,
        counts,
        num_computed,
        block_tables,
        num_groups,
        num_rows,
        block_tables.stride(0),
        block_tables.stride(1),
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=triton.next_power_of_2(num_rows),
        BLOCK_WIDTH=triton.next_power_of_2(width),
    )
    return found
