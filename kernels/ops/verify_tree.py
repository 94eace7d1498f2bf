"""What becomes of trees of drafts, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor
from kernels.ops.verify_chain import _is_finite, _shift, check_sampled, likeliest_of_chunks
from kernels.reference.sample_nodes import MAX_NODES, SampledNodes
from kernels.reference.verify_tree import TreeRound


# One kernel for every number of rows and drafts that has the same blocks.
@triton.jit(
    do_not_specialize=["num_rows", "num_nodes", "depth", "stride_draft_token_ids_row"],
    do_not_specialize_on_alignment=["probs_ptr"],
)
def _verify_tree_kernel(
    ids_ptr,
    probs_ptr,
    accepted_nodes_ptr,
    last_nodes_ptr,
    next_token_ids_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_token_ids_ptr,
    logits_ptr,
    draft_token_ids_ptr,
    num_draft_tokens_ptr,
    parents_ptr,
    sampled_token_ids_ptr,
    sampled_probs_ptr,
    stride_logits_row,
    stride_draft_token_ids_row,
    vocab_size,
    num_chunks,
    num_rows,
    num_nodes,
    depth,
    HAS_SAMPLED: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The path through one row's tree per program, from the chunks of its logits. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_NODES)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    mask = (nodes < num_nodes)[:, None] & (chunk < num_chunks)[None, :]
    place = (row * num_nodes + nodes)[:, None] * num_chunks + chunk[None, :]
    chunk_max = tl.load(chunk_max_ptr + place, mask=mask, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + place, mask=mask, other=0.0)
    chunk_token_id = tl.load(chunk_token_ids_ptr + place, mask=mask, other=0)

    is_nan = chunk_max != chunk_max
    largest = tl.max(tl.where(is_nan, float("-inf"), chunk_max), axis=1)
    has_nan = tl.max(is_nan.to(tl.int32), axis=1)
    has_largest = mask & (chunk_max == tl.expand_dims(largest, 1))
    best = tl.min(tl.where(has_largest, chunk_token_id, vocab_size - 1), axis=1).to(tl.int64)
    is_finite = ((has_nan == 0) & _is_finite(largest)).to(tl.int32)
    shift = _shift(largest)
    total = tl.sum(chunk_sum * tl.exp(chunk_max - tl.expand_dims(shift, 1)), axis=1)
    if HAS_SAMPLED:
        sampled = tl.load(sampled_token_ids_ptr + row * num_nodes + nodes, mask=nodes < num_nodes, other=-1)
        is_drawn = (sampled >= 0).to(tl.int32)
        best = tl.where(is_drawn != 0, sampled, best)
    tl.store(next_token_ids_ptr + row * num_nodes + nodes, best, mask=nodes < num_nodes)

    is_there = (nodes > 0) & (nodes <= tl.load(num_draft_tokens_ptr + row)) & (nodes < num_nodes)
    parents = tl.load(parents_ptr + nodes, mask=nodes < num_nodes, other=-1).to(tl.int32)
    tokens = tl.load(
        draft_token_ids_ptr + row * stride_draft_token_ids_row + nodes - 1, mask=is_there, other=vocab_size
    )
    ids_ptr += row * (2 * depth + 3)
    node = tl.full([], 0, tl.int32)  # the root
    num_accepted = tl.full([], 0, tl.int32)
    is_open = tl.full([], 1, tl.int32)
    is_usable = tl.full([], 1, tl.int32)
    for level in range(depth):
        is_here = nodes == node
        choice = tl.sum(tl.where(is_here, best, 0), axis=0)
        usable = tl.sum(tl.where(is_here, is_finite, 0), axis=0)
        is_child = is_there & (parents == node) & (is_open != 0)
        following = tl.min(tl.where(is_child & (tokens == choice) & (usable != 0), nodes, BLOCK_NODES), axis=0)
        first = tl.min(tl.where(is_child, nodes, BLOCK_NODES), axis=0)
        is_taken = following < BLOCK_NODES
        is_told = first < BLOCK_NODES
        is_tried = is_told & (usable != 0)
        told = nodes == tl.where(is_taken, following, first)
        token = tl.sum(tl.where(told, tokens, 0), axis=0)
        logit_ptr = logits_ptr + (row * num_nodes + node) * stride_logits_row + token
        logit = tl.load(logit_ptr, mask=is_tried, other=float("-inf"))
        shift_here = tl.sum(tl.where(is_here, shift, 0.0), axis=0)
        total_here = tl.sum(tl.where(is_here, total, 0.0), axis=0)
        prob = tl.where(is_tried, tl.exp(logit - shift_here) / tl.where(is_tried, total_here, 1.0), 0.0)
        accept_prob = tl.where(is_taken, 1.0, 0.0)
        if HAS_SAMPLED:
            is_sampled = tl.sum(tl.where(is_here, is_drawn, 0), axis=0) != 0
            told_node = tl.where(is_taken, following, first)
            prob_ptr = sampled_probs_ptr + row * (num_nodes - 1) + told_node - 1
            sampled_prob = tl.load(prob_ptr, mask=is_tried & is_sampled, other=0.0)
            prob = tl.where(is_sampled, sampled_prob, prob)
            accept_prob = tl.where(is_sampled, sampled_prob, accept_prob)

        tl.store(ids_ptr + level, tl.where(is_open != 0, choice, -1))
        tl.store(ids_ptr + depth + 3 + level, tl.where(is_told, token, -1))
        tl.store(accepted_nodes_ptr + row * depth + level, tl.where(is_taken, following, -1).to(tl.int64))
        prob_ptr = probs_ptr + row * depth + level
        tl.store(prob_ptr, prob)
        tl.store(prob_ptr + num_rows * depth, accept_prob)
        tl.store(prob_ptr + 2 * num_rows * depth, tl.where(is_tried, 1.0, 0.0))
        is_usable = tl.where((is_open != 0) & (usable == 0), 0, is_usable)
        node = tl.where(is_taken, following, node)
        num_accepted += is_taken.to(tl.int32)
        is_open = is_taken.to(tl.int32)

    is_here = nodes == node
    choice = tl.sum(tl.where(is_here, best, 0), axis=0)
    usable = tl.sum(tl.where(is_here, is_finite, 0), axis=0)
    is_usable = tl.where((is_open != 0) & (usable == 0), 0, is_usable)
    tl.store(ids_ptr + depth, tl.where(is_open != 0, choice, -1))
    tl.store(ids_ptr + depth + 1, num_accepted.to(tl.int64))
    tl.store(ids_ptr + depth + 2, is_usable.to(tl.int64))
    tl.store(last_nodes_ptr + row, node.to(tl.int64))


def verify_tree(
    logits: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    parents: Tensor,
    depth: int,
    sampled: SampledNodes | None = None,
) -> TreeRound:
    """Follow each row's tree from the root on as long as a child is the target's own token, and add the one behind.

    The target's token behind a node is the lowest id that has its largest logit, which has to be finite; or of a sampled row
    what `sample_nodes` has drawn. A drafted token is accepted where its parent is, it is that token, and no sibling before it
    holds the same. The last token is the target's behind the last accepted node. Two launches: one pass over the logits, as of
    `verify_chain`, and one that walks.

    Args:
        logits: float32 [num_rows * num_nodes, vocab_size], strides (any, 1), behind each node, the root first
        draft_token_ids: int64 [num_rows, num_nodes - 1], strides (any, 1), of the nodes from 1 on, below vocab_size
        num_draft_tokens: int64 [num_rows], stride (1,), 0 to num_nodes - 1; nodes behind those are padding, whatever they hold
        parents: int64 [num_nodes], stride (1,), of each node an earlier one and none before its predecessor's; -1 of the root
        depth: of the deepest node, at least 1
        sampled: of `sample_nodes` over these trees, contiguous; None: all rows are greedy
    Returns:
        `TreeRound`. In each row of `ids` depth + 1 columns with the accepted tokens, the last one and -1 behind it; how many
        were accepted; 1, or 0 where a node of the path has no finite maximum, and then the last token is some id of the
        vocabulary; and the drafts of the path. Behind them, of each of those drafts its probability, of a greedy row at
        temperature 1, with which it is accepted, of a greedy row 1 or 0, and 1; of a child that was not tried, for its parent
        has no finite maximum, and of padding 0. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, the vocabulary is empty, or there are more than 64 nodes or
            none beside the root. Values are not read, hence not checked.
    """
    num_rows, num_nodes = num_draft_tokens.numel(), parents.numel()
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"parents has {num_nodes} entries; 2 to {MAX_NODES} are expected")
    if not 1 <= depth < num_nodes:
        raise ValueError(f"depth is {depth}; a tree of {num_nodes} nodes is 1 to {num_nodes - 1} deep")
    check_tensor("parents", parents, (num_nodes,), torch.int64, logits.device)
    check_tensor("num_draft_tokens", num_draft_tokens, (num_rows,), torch.int64, logits.device)
    check_tensor("draft_token_ids", draft_token_ids, (num_rows, num_nodes - 1), torch.int64, logits.device)
    check_tensor("logits", logits, (num_rows * num_nodes, None), torch.float32, logits.device)
    vocab_size = logits.shape[1]
    if vocab_size == 0:
        raise ValueError("logits has 0 columns; at least 1 is expected")
    if sampled is not None:
        check_sampled(sampled, num_rows, num_nodes, logits.device)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    num_bytes = 8 * num_rows * (2 * depth + 3)
    packed = empty(num_bytes + 12 * num_rows * depth, dtype=torch.uint8)
    ids = packed[:num_bytes].view(torch.int64).view(num_rows, 2 * depth + 3)
    output = TreeRound(packed, ids, empty(num_rows, depth), empty(num_rows), empty(num_rows, num_nodes))
    if num_rows == 0:
        return output
    chunk_max, chunk_sum, chunk_token_ids = likeliest_of_chunks(logits)
    num_chunks = chunk_max.shape[1]
    _verify_tree_kernel[(num_rows,)](
        ids,
        packed[num_bytes:].view(torch.float32),
        output.accepted_nodes,
        output.last_nodes,
        output.next_token_ids,
        chunk_max,
        chunk_sum,
        chunk_token_ids,
        logits,
        draft_token_ids,
        num_draft_tokens,
        parents,
        None if sampled is None else sampled.token_ids,
        None if sampled is None else sampled.probs,
        logits.stride(0),
        draft_token_ids.stride(0),
        vocab_size,
        num_chunks,
        num_rows,
        num_nodes,
        depth,
        HAS_SAMPLED=sampled is not None,
        BLOCK_NODES=triton.next_power_of_2(num_nodes),
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,  # pyright: ignore[reportCallIssue]  (a launch option)
    )
    return output
