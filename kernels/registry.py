"""Every op that has a kernel, by name.

Importing this needs no triton; asking for a launcher does.
"""

from __future__ import annotations

from kernels.kernel_op import KernelOp
from kernels.specs import (
    byte_gated_linear,
    byte_qkv_rotary_store,
    compact_kv_cache,
    decode_positions,
    draft_positions,
    embed_tokens,
    fp8_linear,
    gather_round,
    greedy_tokens,
    int8_linear,
    int_linear,
    nf4_gated_linear,
    nf4_linear,
    nf4_qkv_rotary_store,
    norm_embedding_and_features,
    norm_gated_linear,
    norm_linear,
    norm_qkv_rotary_store,
    paged_attention,
    paged_decode_attention,
    quantize_tokens,
    record_tokens,
    rms_norm,
    rms_norm_quantize,
    rotary_and_store,
    round_positions,
    sample_tokens,
    settle_round,
    silu_and_mul,
    silu_and_mul_quantize,
    store_kv_cache,
    top_tokens,
    verify_greedy,
    verify_tree,
)

REGISTRY: dict[str, KernelOp] = {
    spec.OP.name: spec.OP
    for spec in (
        rms_norm,
        store_kv_cache,
        paged_attention,
        paged_decode_attention,
        silu_and_mul,
        rotary_and_store,
        norm_linear,
        norm_gated_linear,
        norm_qkv_rotary_store,
        int_linear,
        quantize_tokens,
        rms_norm_quantize,
        silu_and_mul_quantize,
        fp8_linear,
        int8_linear,
        byte_gated_linear,
        byte_qkv_rotary_store,
        nf4_linear,
        nf4_gated_linear,
        nf4_qkv_rotary_store,
        embed_tokens,
        norm_embedding_and_features,
        decode_positions,
        draft_positions,
        round_positions,
        greedy_tokens,
        top_tokens,
        sample_tokens,
        record_tokens,
        compact_kv_cache,
        gather_round,
        verify_greedy,
        verify_tree,
        settle_round,
    )
}
