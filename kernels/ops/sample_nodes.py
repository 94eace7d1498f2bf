"""What sampled rows draw behind each node of their drafts, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor
from kernels.ops.next_draws import uniform
from kernels.ops.sample_tokens import LOG2_E, blocks_of, draw_token
from kernels.reference.sample_nodes import MAX_NODES, SampledNodes
from kernels.reference.sample_tokens import GREEDY_TEMPERATURE


# One kernel for every number of nodes that has the same block.
@triton.jit(do_not_specialize=["num_nodes", "stride_draft_token_ids_row"])
def _sample_nodes_kernel(
    token_ids_ptr,
    probs_ptr,
    logits_ptr,
    draft_token_ids_ptr,
    parents_ptr,
    depths_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    num_prompt_tokens_ptr,
    num_computed_ptr,
    stride_logits_row,
    stride_draft_token_ids_row,
    vocab_size,
    num_nodes,
    GREEDY_TEMPERATURE: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_NUM_BLOCKS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """One node per program. Grid: (num_rows * num_nodes,)."""
    place = tl.program_id(0).to(tl.int64)
    row, node = place // num_nodes, place % num_nodes
    temperature = tl.load(temperature_ptr + row)
    tl.store(token_ids_ptr + place, tl.full([], -1, tl.int64))
    if node > 0:
        tl.store(probs_ptr + row * (num_nodes - 1) + node - 1, 0.0, mask=temperature < GREEDY_TEMPERATURE)
    if temperature < GREEDY_TEMPERATURE:
        return
    logits_ptr += place * stride_logits_row
    lane = tl.arange(0, BLOCK)
    largest_of_lane = tl.full([BLOCK], float("-inf"), tl.float32)
    nan_of_lane = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        logits = tl.load(logits_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        nan_of_lane |= (logits != logits).to(tl.int32)
        largest_of_lane = tl.maximum(largest_of_lane, logits)
    largest = tl.max(largest_of_lane, axis=0)
    is_usable = (tl.max(nan_of_lane, axis=0) == 0) & (tl.abs(largest) < float("inf"))

    nodes = tl.arange(0, BLOCK_NODES)
    is_child = (nodes > 0) & (nodes < num_nodes)
    is_child &= tl.load(parents_ptr + nodes, mask=is_child, other=-1) == node
    prob_ptrs = probs_ptr + row * (num_nodes - 1) + nodes - 1
    if is_usable == 0:
        tl.store(prob_ptrs, tl.zeros([BLOCK_NODES], tl.float32), mask=is_child)
        return
    position = tl.load(num_computed_ptr + row) + 1 - tl.load(num_prompt_tokens_ptr + row) + tl.load(depths_ptr + node)
    token_id, threshold, last_equal_id, total = draw_token(
        logits_ptr,
        vocab_size,
        largest,
        temperature,
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
        uniform(tl.load(seeds_ptr + row), position),
        LOG2_E,
        BLOCK,
        MAX_NUM_BLOCKS,
    )
    tl.store(token_ids_ptr + place, token_id.to(tl.int64))
    drafts = tl.load(
        draft_token_ids_ptr + row * stride_draft_token_ids_row + nodes - 1, mask=is_child, other=vocab_size
    )
    is_child_token = is_child & (drafts >= 0) & (drafts < vocab_size)  # padding may hold anything
    logits = tl.load(logits_ptr + drafts, mask=is_child_token, other=float("-inf"))
    is_kept = (logits > threshold) | ((logits == threshold) & (drafts <= last_equal_id))
    weights = tl.exp2((logits - largest) * (LOG2_E / temperature))
    probs = tl.where(is_child_token & is_kept, weights / total.to(tl.float32), 0.0)
    tl.store(prob_ptrs, probs, mask=is_child)


def sample_nodes(
    logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    num_prompt_tokens: Tensor,
    num_computed: Tensor,
) -> SampledNodes:
    """The token that plain decoding would draw behind each node of a row's drafts, and how likely each draft was there.

    Of each node the token of `sample_tokens`, with the draw of (seed, output position, token) that Philox4x32-10 gives: see
    `backend.sample.random`, which this agrees with to the bit. The output position of a row's root is `num_computed + 1 -
    num_prompt_tokens`, of what is behind a node by its depth more. Where a drafted token is accepted if it is that very token,
    it is with its probability under the target, and what comes in place of a refused one has the rest of the target's
    distribution: it is the rejection of Leviathan et al. 2023 for a draft that is a point mass, with draws that no draft
    changes.

    One launch, in which the programs of greedy rows end at once.

    Args:
        logits: float32 [num_rows * num_nodes, vocab_size], strides (any, 1), behind each node, the root first
        draft_token_ids: int64 [num_rows, num_nodes - 1], strides (any, 1), of the nodes from 1 on; one outside the
            vocabulary is padding
        parents: int64 [num_nodes], stride (1,), of each node an earlier one; -1 of the root. A chain's are -1, 0, 1 and so on.
        depths: int64 [num_nodes], stride (1,), of each node; 0 of the root
        temperature: float32 [num_rows], stride (1,); below 1e-5 the row is greedy
        top_k: int32 [num_rows], stride (1,); below 1, or vocab_size and more: off
        top_p: float32 [num_rows], stride (1,), above 0; 1 and more: off
        seeds: int64 [num_rows], stride (1,), the bits of an unsigned one
        num_prompt_tokens: int64 [num_rows], stride (1,)
        num_computed: int64 [num_rows], stride (1,), tokens before each row's last one
    Returns:
        `SampledNodes`; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, the vocabulary is empty, or there are more than 64 nodes or
            none beside the root. Values are not read, hence not checked.
    """
    num_rows, num_nodes = temperature.numel(), parents.numel()
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"parents has {num_nodes} entries; 2 to {MAX_NODES} are expected")
    check_tensor("logits", logits, (num_rows * num_nodes, None), torch.float32, logits.device)
    vocab_size = logits.shape[1]
    if vocab_size == 0:
        raise ValueError("logits has 0 columns; at least 1 is expected")
    check_tensor("draft_token_ids", draft_token_ids, (num_rows, num_nodes - 1), torch.int64, logits.device)
    for name, tensor in (("parents", parents), ("depths", depths)):
        check_tensor(name, tensor, (num_nodes,), torch.int64, logits.device)
    check_tensor("temperature", temperature, (num_rows,), torch.float32, logits.device)
    check_tensor("top_k", top_k, (num_rows,), torch.int32, logits.device)
    check_tensor("top_p", top_p, (num_rows,), torch.float32, logits.device)
    for name, tensor in (
        ("seeds", seeds),
        ("num_prompt_tokens", num_prompt_tokens),
        ("num_computed", num_computed),
    ):
        check_tensor(name, tensor, (num_rows,), torch.int64, logits.device)

    token_ids = torch.empty((num_rows, num_nodes), dtype=torch.int64, device=logits.device)
    probs = torch.empty((num_rows, num_nodes - 1), dtype=torch.float32, device=logits.device)
    if num_rows:
        block, max_num_blocks, num_warps = blocks_of(vocab_size)
        _sample_nodes_kernel[(num_rows * num_nodes,)](
            token_ids,
            probs,
            logits,
            draft_token_ids,
            parents,
            depths,
            temperature,
            top_k,
            top_p,
            seeds,
            num_prompt_tokens,
            num_computed,
            logits.stride(0),
            draft_token_ids.stride(0),
            vocab_size,
            num_nodes,
            GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
            LOG2_E=LOG2_E,
            BLOCK=block,
            MAX_NUM_BLOCKS=max_num_blocks,
            BLOCK_NODES=triton.next_power_of_2(num_nodes),
            num_warps=num_warps,  # pyright: ignore[reportCallIssue]  (a launch option)
        )
    return SampledNodes(token_ids, probs)
