"""Causal attention over the paged KV cache, in plain torch. It is also the product's path on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from kernels.reference.kv_quantization import dequantize

# Keys (or values) that one batch of decode rows gathers at most, counted as fp32. A gather larger than the caches of
# a CPU core is written to memory and read back, and beyond 32 MiB each call pays for fresh pages too.
MAX_GATHER_BYTES = 4 * 2**20
# Rows of a chunk that attend together. Each tile stops at its own last position, so a smaller one computes less of
# what causality hides, and its mask stays small however long the chunk.
QUERY_TILE = 128


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
) -> Tensor:
    """Attend from each query row to its request's positions up to its own.

    `out[t, h] = softmax_j(scale * query[t, h] . k[j, h // group]) v[j, h // group]`, over the positions
    `max(0, p - window + 1) <= j <= p` of the row's request (`0 <= j <= p` without a window). Row i of request r sits at
    `p = seq_lens[r] - query_len[r] + i`; position j is at `block_table[r, j // block_size]`, offset `j % block_size`.
    Scores, softmax and sums are in fp32. Only slots of a request's own positions reach its rows, so that what others
    left in a reused block (NaN, say) has no effect.

    With `tree_mask` a row may be a node of a tree: the keys of nodes lie from `s = tree_starts[r]` on, and of those the row
    sees the j-th if bit j of `tree_mask[t]` is set, which it is for the row itself and its ancestors, none of them behind it.
    It sees all before s, and stands at `p = s - 1 +` the number of its bits, nodes it sees one position each: a window counts
    those.

    Args:
        query: float [num_tokens, num_heads, head_dim]
        key_cache: query.dtype [num_blocks, block_size, num_kv_heads, head_dim], contiguous. With scales what `quantize`
            of `kv_quantization` gives: int8, float8_e4m3fn, or uint8 with half as many columns
        value_cache: as key_cache
        block_table: int32 [num_reqs, max_num_blocks]; entries past a request's blocks or behind its window must be
            valid ids (the null block), but are not used
        query_start_loc: int32 [num_reqs + 1], leading 0: the rows of request r are [r] up to [r + 1], maybe none
        seq_lens: int32 [num_reqs], at least the request's query_len
        scale: factor of the scores, usually head_dim ** -0.5
        window: positions a row attends to, its own included; None for all
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2], contiguous
        value_scales: as key_scales
        tree_mask: int64 [num_tokens]; -1 for the rows of a request without a tree; None: there are no trees
        tree_starts: int32 [num_reqs], unused for a request without a tree; None if there are no trees
    Returns:
        query.dtype [num_tokens, num_heads, head_dim]; rows past query_start_loc[-1] are unspecified. Nothing is
        mutated.
    """
    keys, values = _Vectors(key_cache, key_scales), _Vectors(value_cache, value_scales)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    trees = _tree_rows(tree_mask, tree_starts, starts)
    decodes = [r for r in range(len(lens)) if starts[r + 1] - starts[r] == 1 and r not in trees]
    groups = _decode_groups(decodes, lens, MAX_GATHER_BYTES // (4 * keys.num_heads * query.shape[2]))
    if len(groups) == 1 and len(decodes) == len(lens) == len(query):
        return _attend_decodes(query, keys, values, block_table, seq_lens, lens, scale, window)

    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in groups:
        requests = torch.tensor(group, device=query.device)
        rows = query_start_loc.index_select(0, requests).long()
        attended = _attend_decodes(
            query.index_select(0, rows),
            keys,
            values,
            block_table.index_select(0, requests),
            seq_lens.index_select(0, requests),
            [lens[r] for r in group],
            scale,
            window,
        )
        output.index_copy_(0, rows, attended)
    for r, seq_len in enumerate(lens):
        start, end = starts[r], starts[r + 1]
        if r in trees:
            attend = partial(_attend_nodes, *trees[r])
        elif end - start > 1:
            attend = _attend_chunk
        else:
            continue
        attend(output[start:end], query[start:end], keys, values, block_table[r], seq_len, scale, window)
    return output


def _tree_rows(
    tree_mask: Tensor | None, tree_starts: Tensor | None, starts: list[int]
) -> dict[int, tuple[Tensor, int]]:
    """Of each request with a tree, the bits of its rows and where the tree begins."""
    if tree_mask is None or tree_starts is None:
        return {}
    rows = [tree_mask[start:end] for start, end in pairwise(starts)]
    return {
        r: (bits, begin)
        for r, (bits, begin) in enumerate(zip(rows, tree_starts.tolist(), strict=True))
        if len(bits) and int(bits[0]) != -1
    }


@dataclass(frozen=True, slots=True)
class _Vectors:
    """The keys, or the values, of a paged cache as fp32."""

    cache: Tensor  # [num_blocks, block_size, num_kv_heads, width]
    scales: Tensor | None

    @property
    def block_size(self) -> int:
        return self.cache.shape[1]

    @property
    def num_heads(self) -> int:
        return self.cache.shape[2]

    def rows(self, rows: Tensor) -> Tensor:
        """[num_rows, head_dim] of the cache seen as [num_blocks * block_size * num_kv_heads, head_dim]."""
        data = self.cache.view(-1, self.cache.shape[3]).index_select(0, rows)
        if self.scales is None:
            return data.float()
        return dequantize(data, self.scales.view(-1, self.scales.shape[3]).index_select(0, rows))

    def blocks(self, block_ids: Tensor, num_tokens: int) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim], the first of these blocks laid end to end."""
        data = self.cache.index_select(0, block_ids).flatten(0, 1)[:num_tokens]
        if self.scales is None:
            return data.float()
        return dequantize(data, self.scales.index_select(0, block_ids).flatten(0, 1)[:num_tokens])


def _decode_groups(requests: list[int], lens: list[int], max_tokens: int) -> list[list[int]]:
    """Split `requests` so that no group, padded to its longest, gathers more than `max_tokens` (or is one request)."""
    if not requests:
        return []
    if len(requests) * max(lens[r] for r in requests) <= max_tokens:
        return [requests]
    groups: list[list[int]] = []
    # Longest first: a group is padded to its first request, and neighbours in length waste least.
    for r in sorted(requests, key=lens.__getitem__, reverse=True):
        if groups and (len(groups[-1]) + 1) * lens[groups[-1][0]] <= max_tokens:
            groups[-1].append(r)
        else:
            groups.append([r])
    return groups


def _attend_decodes(
    query: Tensor,
    keys: _Vectors,
    values: _Vectors,
    block_table: Tensor,
    seq_lens: Tensor,
    lens: list[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend from one row per request, as one batch padded to the longest: query [B, num_heads, head_dim]."""
    num_reqs, num_heads, head_dim = query.shape
    block_size, num_kv_heads = keys.block_size, keys.num_heads
    longest = max(lens)
    first_block = 0 if window is None else max(0, min(lens) - window) // block_size
    first = first_block * block_size
    blocks = block_table[:, first_block : math.ceil(longest / block_size)]

    # Rows of the cache seen as [num_blocks * block_size * num_kv_heads, head_dim], gathered head by head: the two
    # products below then run over contiguous matrices, which at a thousand tokens is twice as fast as a strided view.
    offsets = _head_row_offsets(block_size, num_kv_heads, query.device)
    rows = torch.add(offsets, blocks[:, None, :, None], alpha=block_size * num_kv_heads)
    rows = rows.view(num_reqs, num_kv_heads, -1)[:, :, : longest - first]
    hidden = None
    if min(lens) < longest or (window is not None and first < longest - window):
        positions = torch.arange(first, longest, dtype=torch.int32, device=query.device)
        ends = seq_lens[:, None]
        hidden = positions >= ends
        own_row = rows[:, :, :1]
        if window is not None:
            hidden |= positions < ends - window
            own_row = rows.gather(2, (ends[:, None] - 1 - first).long().expand(-1, num_kv_heads, -1))
        # A hidden slot may hold NaN, which a zero weight does not undo: read one of the request's own instead.
        rows = torch.where(hidden[:, None], own_row, rows)
    rows = rows.reshape(-1)
    shape = (num_reqs * num_kv_heads, longest - first, head_dim)
    key, value = keys.rows(rows).view(shape), values.rows(rows).view(shape)

    grouped_query = (query.float() * scale).view(num_reqs * num_kv_heads, -1, head_dim)
    scores = torch.bmm(grouped_query, key.transpose(1, 2))
    if hidden is not None:
        scores.view(num_reqs, num_heads, -1).masked_fill_(hidden[:, None], -math.inf)
    return torch.bmm(torch.softmax(scores, dim=-1), value).view(query.shape).to(query.dtype)


def _attend_chunk(
    output: Tensor,
    query: Tensor,
    keys: _Vectors,
    values: _Vectors,
    block_ids: Tensor,
    seq_len: int,
    scale: float,
    window: int | None,
) -> None:
    """Attend from the last rows of one request: query [query_len, num_heads, head_dim], into `output`, as query."""
    query_len, num_heads, head_dim = query.shape
    block_size, num_kv_heads = keys.block_size, keys.num_heads
    group = num_heads // num_kv_heads
    num_computed = seq_len - query_len
    first_block = 0 if window is None else max(0, num_computed - window + 1) // block_size
    first = first_block * block_size
    blocks = block_ids[first_block : math.ceil(seq_len / block_size)]

    def by_group(rows: Tensor) -> Tensor:
        """[num_kv_heads, group, rows, head_dim] of query or output rows."""
        return rows.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)

    def per_head(vectors: _Vectors) -> Tensor:
        """[num_kv_heads, group, seq_len - first, head_dim], the group as a view: no key is copied per query head."""
        tokens = vectors.blocks(blocks, seq_len - first)
        return tokens.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)

    query, output = by_group(query.float()), by_group(output)
    key, value = per_head(keys), per_head(values)
    for begin in range(0, query_len, QUERY_TILE):
        end = min(begin + QUERY_TILE, query_len)
        position = num_computed + begin  # of the tile's first row
        low = first if window is None else max(0, position - window + 1)
        seen = slice(low - first, num_computed + end - first)
        mask = query.new_full((end - begin, seen.stop - seen.start), -math.inf)
        if window is None:
            mask.triu_(position - low + 1)
        else:
            mask = mask.triu(position - low + 1) + mask.tril(position - low - window)
        output[:, :, begin:end] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, begin:end], key[:, :, seen], value[:, :, seen], attn_mask=mask, scale=scale
        )


def _attend_nodes(
    tree_bits: Tensor,
    tree_start: int,
    output: Tensor,
    query: Tensor,
    keys: _Vectors,
    values: _Vectors,
    block_ids: Tensor,
    seq_len: int,
    scale: float,
    window: int | None,
) -> None:
    """`_attend_chunk` from the nodes of a tree: tree_bits int64 [query_len]."""
    block_size, group = keys.block_size, query.shape[1] // keys.num_heads
    first = 0 if window is None else max(0, tree_start - window + 1) // block_size * block_size
    blocks = block_ids[first // block_size : math.ceil(seq_len / block_size)]
    key, value = (vectors.blocks(blocks, seq_len - first).transpose(0, 1) for vectors in (keys, values))
    place = torch.arange(first, seq_len, device=query.device)
    node = (place - tree_start).clamp(0, 63)
    sees_node = (tree_bits[:, None] >> node) & 1 != 0
    visible = torch.where(place < tree_start, True, sees_node)
    if window is not None:
        # Nodes that a row sees follow each other, one position each.
        depth = (sees_node & (place >= tree_start)).cumsum(dim=1)
        position = torch.where(place < tree_start, place, tree_start - 1 + depth)
        visible &= position > position[:, -1:] - window
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1).unflatten(0, (-1, group)),
        key[:, None].expand(-1, group, -1, -1),
        value[:, None].expand(-1, group, -1, -1),
        attn_mask=visible,
        scale=scale,
    )
    output.copy_(attended.flatten(0, 1).transpose(0, 1))


@lru_cache(maxsize=32)
def _head_row_offsets(block_size: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """int64 [num_kv_heads, 1, block_size]: a head's rows within a block of [block_size, num_kv_heads] rows."""
    heads = torch.arange(num_kv_heads, device=device)[:, None, None]
    return heads + torch.arange(block_size, device=device) * num_kv_heads
