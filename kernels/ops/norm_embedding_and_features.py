"""Tokens' embeddings and the features beside them, each normalised, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.pdl import supports_pdl
from kernels.ops.rms_norm import MAX_HIDDEN, normed_row


# Token ids may be a part of a step's arrays, which lie end to end: where it begins is not to make another kernel of it.
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def _norm_embedding_and_features_kernel(
    output_ptr,
    token_ids_ptr,
    embedding_ptr,
    embedding_norm_weight_ptr,
    features_ptr,
    feature_norm_weight_ptr,
    eps,
    stride_output_token,
    stride_embedding_id,
    stride_features_token,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One half of a token's row per program, the embedding first. Grid: (num_tokens, 2)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    if half == 0:
        weight = tl.load(embedding_norm_weight_ptr + column, mask=mask, other=0.0)
    else:
        weight = tl.load(feature_norm_weight_ptr + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if half == 0:
        token_id = tl.load(token_ids_ptr + token)
        x = tl.load(embedding_ptr + token_id * stride_embedding_id + column, mask=mask, other=0.0)
    else:
        x = tl.load(features_ptr + token * stride_features_token + column, mask=mask, other=0.0)
    output = normed_row(x.to(tl.float32), weight, eps, HIDDEN)
    tl.store(output_ptr + token * stride_output_token + half * HIDDEN + column, output, mask=mask)


def norm_embedding_and_features(
    token_ids: Tensor,
    embedding: Tensor,
    embedding_norm_weight: Tensor,
    features: Tensor,
    feature_norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Look each token's embedding up, normalise it and its features, and lay both side by side.

    `y[t] = [rms_norm(embedding[token_ids[t]], embedding_norm_weight), rms_norm(features[t], feature_norm_weight)]`, each
    half in fp32 up to its cast, as `rms_norm` does it.

    Args:
        token_ids: int64 [num_tokens], stride (1,), in 0..vocab_size - 1
        embedding: float32, bfloat16 or float16 [vocab_size, hidden], strides (any, 1)
        embedding_norm_weight: embedding.dtype [hidden], stride (1,)
        features: embedding.dtype [num_tokens, hidden], strides (any, 1)
        feature_norm_weight: embedding.dtype [hidden], stride (1,)
        eps: added to the mean squares
    Returns:
        embedding.dtype [num_tokens, 2 * hidden], contiguous; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or hidden is above 65,536. Ids are not read.
    """
    check_float_dtype("embedding", embedding)
    dtype, device = embedding.dtype, embedding.device
    check_tensor("embedding", embedding, (None, None), dtype, device)
    num_tokens, hidden = token_ids.numel(), embedding.shape[1]
    check_tensor("token_ids", token_ids, (num_tokens,), torch.int64, device)
    check_tensor("embedding_norm_weight", embedding_norm_weight, (hidden,), dtype, device)
    check_tensor("features", features, (num_tokens, hidden), dtype, device)
    check_tensor("feature_norm_weight", feature_norm_weight, (hidden,), dtype, device)
    if hidden > MAX_HIDDEN:
        raise ValueError(f"embedding has {hidden} columns; at most {MAX_HIDDEN} are allowed")

    output = torch.empty((num_tokens, 2 * hidden), dtype=dtype, device=device)
    if output.numel() == 0:
        return output
    block = triton.next_power_of_2(hidden)
    pdl = supports_pdl(device)
    _norm_embedding_and_features_kernel[(num_tokens, 2)](
        output,
        token_ids,
        embedding,
        embedding_norm_weight,
        features,
        feature_norm_weight,
        eps,
        output.stride(0),
        embedding.stride(0),
        features.stride(0),
        HIDDEN=hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output
