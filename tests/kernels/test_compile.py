"""What the interpreter lets pass and a compiler does not: the kernels compile for a GPU, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ops import (
    attention_tiles,
    code_tiles,
    code_matrix,
    compact_kv_cache,
    decode_positions,
    draft_positions,
    embed_tokens,
    gather_round,
    greedy_tokens,
    int_linear,
    next_draws,
    ngram_drafts,
    norm_embedding_and_features,
    norm_gated_linear,
    norm_linear,
    norm_qkv_rotary_store,
    paged_attention,
    paged_decode_attention,
    record_tokens,
    rms_norm,
    rotary_and_store,
    round_positions,
    sample_nodes,
    settle_round,
    store_kv_cache,
    top_tokens,
    verify_chain,
    verify_tree,
)
from kernels.ops.fragment_projection import fragment_options
from kernels.ops.projection import Tiles, default_tiles

TYPES = {
    "*i64": "token_ids vocabulary starts counts last_indices positions slot_mapping rows outcome "
    "tree_mask source_slots target_slots addresses slot_words "
    "num_computed places slot_mappings pass_positions pass_slot_mappings "
    "num_granted lengths chunk_found "
    "ids sources last_token_ids next_token_ids drafts draft_token_ids num_draft_tokens "
    "accepted_nodes last_nodes parents depths seeds num_prompt_tokens sampled_token_ids positions",
    "*i32": "block_table block_tables pass_seq_lens chunk_token_ids texts query_start_loc seq_lens arrivals words counters "
    "tree_starts top_k",
    "*fp32": "logits probs sampled_probs temperature top_p "
    "chunk_max chunk_sum chunk_top cos_sin_cache square_sums next_square_sums "
    "partial partial_max partial_sum",
    "*fp64": "draws",
    "*i1": "finite",
    "*fp16": "key_scales value_scales scales origins",
}
POINTERS = {f"{name}_ptr": kind for kind, names in TYPES.items() for name in names.split()}
CODES = {"int8": "*i8", "fp8_e4m3": "*u8", "int4": "*u8"}
CONSUMER_SHARED_BYTES = 99 * 1024  # what a consumer card gives one program
HOPPER_SHARED_BYTES = 227 * 1024
EVERY_CASE = sys.argv[1:] == ["every case"]


def covering(*cases, more=()):
    # Of what compiles in seconds: the cases that together take every path of a kernel, and those that are asked for by hand.
    return (*cases, *more) if EVERY_CASE else cases


def shared_bytes(kernel, constants, num_warps=4, num_stages=2, without=(), boxes={}):
    # What is only asked for inside a kernel (a size, a flag of another version) need not be named here.
    without_fragments = {"FRAGMENTS": 0, "FRAGMENTS_ONCE": False}
    constants = without_fragments | {"PDL": False, "AHEAD": False, "SMALL": not boxes, "TMA": bool(boxes)} | constants
    if constants.get("FORMAT") is None:
        constants |= {"FORMAT": None, "key_scales_ptr": None, "value_scales_ptr": None}
    constants |= dict.fromkeys(without, None)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in boxes:
            signature[name] = f"tensordesc<bf16{boxes[name]}>"
        elif name.endswith("_ptr"):
            quantized = CODES.get(constants.get("FORMAT")) if "cache" in name and name != "cos_sin_cache_ptr" else None
            codes = "*i32" if name == "weight_ptr" and constants.get("BITS") else None
            signature[name] = quantized or codes or POINTERS.get(name, "*bf16")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("eps", "scale") else "i32"
            aligned = constants.get("FORMAT") is not None and "cache" in name  # bytes are loaded by 16
            if aligned or name in ("stride_x_token", "stride_weight_row", "stride_words_row", "num_columns"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": constants.get("PDL", False)}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".target sm_90" in compiled.asm["ptx"]
    # A kernel that may start early has to wait before it reads what the one before it writes.
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == constants.get("PDL", False)
    assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) == bool(boxes)
    return compiled.metadata.shared


for pdl in (False, True):
    assert shared_bytes(rms_norm._rms_norm_kernel, {"HIDDEN": 576, "BLOCK": 1024, "PDL": pdl}) <= CONSUMER_SHARED_BYTES
sizes = {"BLOCK_SIZE": 24, "NUM_KV_HEADS": 3, "HEAD_DIM": 80, "BLOCK": 256}
assert shared_bytes(store_kv_cache._store_kv_cache_kernel, sizes) == 0
for norm in (False, True):
    sizes = {"NEXT_NORM": norm, "HIDDEN": 576, "BLOCK": 1024}
    without = () if norm else ("next_norm_weight_ptr", "scaled_ptr", "square_sums_ptr")
    # The embeddings' own sums are its output, the only `square_sums_ptr` there is.
    assert shared_bytes(embed_tokens._embed_tokens_kernel, sizes, without=without) <= CONSUMER_SHARED_BYTES
for grows in (False, True):
    sizes = {"GROWS": grows, "BLOCK": 128}
    without = () if grows else ("seq_lens_ptr",)
    assert shared_bytes(record_tokens._record_tokens_kernel, sizes, without=without) <= CONSUMER_SHARED_BYTES
assert shared_bytes(next_draws._next_draws_kernel, {"BLOCK": 128}) <= CONSUMER_SHARED_BYTES
assert shared_bytes(decode_positions._decode_positions_kernel, {"BLOCK_SIZE": 16, "BLOCK": 128}) <= CONSUMER_SHARED_BYTES
sizes = {"WIDTH": 6, "BLOCK_SIZE": 24, "BLOCK_ROWS": 32, "BLOCK_WIDTH": 8}
assert shared_bytes(round_positions._round_positions_kernel, sizes) <= CONSUMER_SHARED_BYTES
assert shared_bytes(draft_positions._draft_positions_kernel, {"BLOCK_SIZE": 24, "BLOCK": 128}) == 0
sizes = {"HIDDEN": 576, "BLOCK": 1024, "PDL": True}
norm_features = norm_embedding_and_features._norm_embedding_and_features_kernel
assert shared_bytes(norm_features, sizes) <= CONSUMER_SHARED_BYTES
for mapped in (False, True):
    sizes = {"MAPPED": mapped, "IS_WHOLE_ROW": mapped, "BLOCK": greedy_tokens.WIDER * greedy_tokens.BLOCK}
    sizes |= {"BLOCK_CHUNKS": 32}
    without = () if mapped else ("vocabulary_ptr",)
    for kernel in (greedy_tokens._largest_of_chunk_kernel, greedy_tokens._largest_of_row_kernel):
        assert shared_bytes(kernel, sizes, 16, without=without) <= CONSUMER_SHARED_BYTES
assert shared_bytes(ngram_drafts._find_in_chunk_kernel, {"BLOCK": ngram_drafts.BLOCK}, 8) <= CONSUMER_SHARED_BYTES
for sizes in ({"BLOCK_K": 2, "BLOCK_CHUNKS": 1}, {"BLOCK_K": 64, "BLOCK_CHUNKS": 128}):
    assert shared_bytes(ngram_drafts._draft_from_text_kernel, sizes) <= CONSUMER_SHARED_BYTES
for kernel in (gather_round._gather_round_kernel, settle_round._settle_round_kernel):
    assert shared_bytes(kernel, {"BLOCK": 128}) == 0
assert shared_bytes(verify_chain._verify_chunk_kernel, {"BLOCK": 2048}) <= CONSUMER_SHARED_BYTES
for sizes in covering({"BLOCK_K": 2, "BLOCK_CHUNKS": 32}, more=[{"BLOCK_K": 64, "BLOCK_CHUNKS": 128}]):
    assert shared_bytes(verify_chain._verify_row_kernel, sizes | {"HAS_SAMPLED": True}) <= CONSUMER_SHARED_BYTES
sizes = {"GREEDY_TEMPERATURE": 1e-5, "LOG2_E": 1.44, "BLOCK": 4096, "MAX_NUM_BLOCKS": 64, "BLOCK_NODES": 64}
assert shared_bytes(sample_nodes._sample_nodes_kernel, sizes, 16) <= CONSUMER_SHARED_BYTES
for width in (1, 8):
    sizes = {"WIDTH": width, "MAPPED": True, "BLOCK": 2048}
    for kernel in (top_tokens._top_of_chunk_kernel, top_tokens._top_of_row_kernel):
        assert shared_bytes(kernel, sizes) <= CONSUMER_SHARED_BYTES
for sizes in covering({"BLOCK_NODES": 2, "BLOCK_CHUNKS": 32}, more=[{"BLOCK_NODES": 64, "BLOCK_CHUNKS": 128}]):
    assert shared_bytes(verify_tree._verify_tree_kernel, sizes | {"HAS_SAMPLED": True}) <= CONSUMER_SHARED_BYTES
sizes = {"NUM_MOVES": 5, "BLOCK": compact_kv_cache.BLOCK}
assert shared_bytes(compact_kv_cache._compact_kv_cache_kernel, sizes) == 0

NO_TREES = ("tree_mask_ptr", "tree_starts_ptr")
for num_tokens, head_dim, window, without in covering(
    (8, 80, None, NO_TREES),
    (48, 64, None, NO_TREES),
    (208, 64, 1000, ()),
    more=[(512, 128, 1000, NO_TREES), (512, 256, None, NO_TREES), (208, 80, None, ())],
):
    tiles = attention_tiles.tile_sizes(num_tokens, 8, 3, head_dim, 2)
    constants = {"GROUP": 3, "HEAD_DIM": head_dim, "BLOCK_SIZE": 24, "WINDOW": window, "PDL": window is None}
    constants |= {"NUM_SPLITS": 16 if num_tokens <= 48 else 1, "CHUNK": 1, "AHEAD": num_tokens == 48}
    constants |= {name.upper(): size for name, size in tiles._asdict().items()}
    shared = shared_bytes(
        paged_attention._paged_attention_kernel, constants, tiles.num_warps, tiles.num_stages, without
    )
    assert shared <= CONSUMER_SHARED_BYTES, (tiles, shared)

for num_splits, head_dim, window, pdl in ((1, 64, None, False), (64, 80, 1000, True)):
    constants = {"GROUP": 3, "HEAD_DIM": head_dim, "BLOCK_SIZE": 24, "WINDOW": window, "PDL": pdl}
    constants |= {"NUM_SPLITS": num_splits, "MIN_KEYS": 64, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_G": 4}
    constants |= {"BLOCK_D": triton.next_power_of_2(head_dim), "TEAM": min(num_splits, 8)}
    constants |= {"BLOCK_TEAMS": max(1, num_splits // 8), "CHUNK": min(num_splits, 4)}
    assert shared_bytes(paged_decode_attention._paged_decode_attention_kernel, constants, 4, 2) <= CONSUMER_SHARED_BYTES

constants = {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "WINDOW": None, "PDL": True}
sizes = {"NUM_SPLITS": 8, "MIN_KEYS": 64, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_G": 4}
sizes |= {"TEAM": 8, "BLOCK_TEAMS": 1, "CHUNK": 8}
for kv_format in CODES:
    sizes |= constants | {"FORMAT": kv_format}
    shared = shared_bytes(paged_decode_attention._paged_decode_attention_kernel, sizes, 4, 2)
    assert shared <= CONSUMER_SHARED_BYTES, (kv_format, shared)
for num_tokens in covering(8, more=[512]):
    tiles = attention_tiles.tile_sizes(num_tokens, 1, 4, 128, 2)
    sizes = constants | {"FORMAT": "int4", "NUM_SPLITS": 16, "MIN_KEYS": 512, "CHUNK": 2}
    sizes |= {name.upper(): size for name, size in tiles._asdict().items()}
    shared = shared_bytes(paged_attention._paged_attention_kernel, sizes, tiles.num_warps, tiles.num_stages, NO_TREES)
    assert shared <= CONSUMER_SHARED_BYTES, (tiles, shared)
sizes = {"BLOCK_SIZE": 24, "NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 128, "FORMAT": "int4", "NUM_SCALES": 2}
sizes |= {"BLOCK_HEADS": 16, "BLOCK_HALF": 64, "LEVELS": 6}
for normed in covering(True, more=[False]):
    sizes |= {"QK_NORM": normed}
    without = () if normed else ("q_norm_weight_ptr", "k_norm_weight_ptr")
    for kernel in (rotary_and_store._rotary_and_store_kernel, rotary_and_store._rotary_and_quantize_kernel):
        kv_format = {} if kernel is rotary_and_store._rotary_and_quantize_kernel else {"FORMAT": None}
        assert shared_bytes(kernel, sizes | kv_format, without=without) <= CONSUMER_SHARED_BYTES
sizes |= {"HEAD_DIM": 80, "BLOCK_HEADS": 4, "FORMAT": "fp8_e4m3", "NUM_SCALES": 1}
assert shared_bytes(store_kv_cache._quantize_vectors_kernel, sizes) <= CONSUMER_SHARED_BYTES

sizes = {"BITS": 4, "ORIGIN": "float", "GROUP": 128, "BIAS": True, "RESIDUAL": True, "EVEN": True, "EVEN_K": True}
few = int_linear._few_tokens_kernel
uneven = {"EVEN": False, "GROUP": 96}
for block_m, shares, changes in covering(
    (1, 4, {"ORIGIN": "none"}), (8, 4, {"BITS": 8}), (16, 1, uneven), more=[(16, 4, uneven)]
):
    cut = {"BLOCK_M": block_m, "BLOCK_N": 32, "SHARES": shares, "AHEAD": 2, "ONCE": block_m == 1}
    without = ("origins_ptr",) if changes.get("ORIGIN") == "none" else ()
    assert shared_bytes(few, sizes | cut | changes, without=without) <= CONSUMER_SHARED_BYTES
cut = {"BLOCK_M": 64, "BLOCK_N": 64, "SPLITS": 4, "WARPS": 4, "IN_REGISTERS": False}
for origin in ("none", "float"):  # `origins` is float16 here: zero points would not do
    without = ("origins_ptr",) if origin == "none" else ()
    shared = shared_bytes(code_tiles.many_tokens_kernel, sizes | cut | {"ORIGIN": origin}, 4, 3, without)
    assert shared <= CONSUMER_SHARED_BYTES, (origin, shared)
cut = {"BLOCK_M": 32, "BLOCK_N": 128, "SPLITS": 4, "WARPS": 8, "IN_REGISTERS": True, "PDL": True}
for changes in ({}, {"EVEN_K": False, "GROUP": 64}, {"BITS": 8, "GROUP": 0}):
    shared = shared_bytes(code_tiles.many_tokens_kernel, sizes | cut | changes, 8, 1)
    assert shared <= 128 * 32 * 4, (changes, shared)  # room for the sums; the codes would take twice as much
sizes = {"BITS": 8, "ORIGIN": "float", "GROUP": 0, "BLOCK_N": 8}
assert shared_bytes(code_matrix._dequantize_codes_kernel, sizes) <= CONSUMER_SHARED_BYTES

EVERYTHING = {"BIAS": True, "RESIDUAL": True, "NEXT_NORM": True, "EVEN_K": False, "BLOCK_PARTS": 64}
NOTHING = {"BIAS": False, "RESIDUAL": False, "NEXT_NORM": False, "EVEN_K": True, "BLOCK_PARTS": 0}
NO_CODES = {"BITS": 0, "ORIGIN": "none", "GROUP": 0, "EVEN": False, "SHARES": 1, "AHEAD": 1, "ONCE": False}
HEADS = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 80, "BLOCK_SIZE": 24}
OPTIONAL = {
    "BIAS": ("bias_ptr",),
    "RESIDUAL": ("residual_ptr",),
    "NEXT_NORM": ("next_norm_weight_ptr", "scaled_ptr", "next_square_sums_ptr"),
    "BLOCK_PARTS": ("square_sums_ptr",),
    "BITS": ("scales_ptr", "origins_ptr"),
}
BOXES = {"x_ptr": [16, 64], "weight_ptr": [64, 64]}  # through the copy engine
KERNELS = (
    norm_linear._norm_linear_kernel,
    norm_gated_linear._norm_gated_linear_kernel,
    norm_qkv_rotary_store._norm_qkv_rotary_store_kernel,
)
for kernel in KERNELS:
    block_n = 64 if kernel is norm_linear._norm_linear_kernel else 128  # one box of weight rows, or two
    for tiles, flags, boxes, limit in (
        (default_tiles(1, 4096, 4096), NOTHING, {}, CONSUMER_SHARED_BYTES),
        (default_tiles(32, 4096, 4096), EVERYTHING, {}, CONSUMER_SHARED_BYTES),
        (Tiles(16, block_n, 64, 4, 4), NOTHING | {"BIAS": True}, BOXES, HOPPER_SHARED_BYTES),
    ):
        flags = flags | NO_CODES
        without = [name for flag, names in OPTIONAL.items() if not flags[flag] for name in names]
        constants = HEADS | flags | {"PDL": True} | {f"BLOCK_{axis}": tiles[i] for i, axis in enumerate("MNK")}
        shared = shared_bytes(kernel, constants, tiles.num_warps, tiles.num_stages, without, boxes)
        assert shared <= limit, (tiles, shared)
CODES_OF = {"BITS": 4, "ORIGIN": "float", "GROUP": 128, "EVEN": True, "SHARES": 4, "AHEAD": 8, "ONCE": True}
CODES_OF |= {"BLOCK_K": 0, "SMALL": False}
CODES_OF |= {} if EVERY_CASE else {"AHEAD": 2}  # of the same steps, fewer are unrolled
for kernel, changes in (
    (norm_gated_linear._norm_gated_linear_kernel, {"BLOCK_M": 1, "BIAS": True}),
    (norm_qkv_rotary_store._norm_qkv_rotary_store_kernel, {"BLOCK_M": 8, "BITS": 8, "ORIGIN": "none", "EVEN": False}),
):
    flags = NOTHING | CODES_OF | {"BLOCK_N": 32} | changes
    without = [name for flag, names in OPTIONAL.items() if not flags[flag] for name in names]
    without += ["origins_ptr"] if flags["ORIGIN"] == "none" else []
    assert shared_bytes(kernel, HEADS | flags | {"PDL": True}, 4, 1, without) <= CONSUMER_SHARED_BYTES
for kernel, num_columns, some in zip(KERNELS, (576, 4096, 576), (EVERYTHING, NOTHING, EVERYTHING)):
    options = fragment_options(num_columns, 4, 160)
    flags = some | NO_CODES | options | {"PDL": True, "BLOCK_M": 8, "BLOCK_N": 16}
    without = [name for flag, names in OPTIONAL.items() if not flags[flag] for name in names]
    shared = shared_bytes(kernel, HEADS | flags, 4, options["num_stages"], without)
    assert shared <= 4 * 16 * 8 * 4, (kernel, shared)  # room for the sums; a step of the weight would take twice as much
print("compiled")
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Each of them, on each of its paths, up to the assembler: it reads all of their PTX, but improves none of it."""
    compile_all(tmp_path, DISABLE_PTXAS_OPT="1")


@pytest.mark.slow
def test_every_case_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Also larger tiles, longer rows, and paths in other combinations."""
    compile_all(tmp_path, "every case")


def compile_all(folder: Path, *arguments: str, **environment: str) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment |= {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout) == (0, "compiled\n"), result.stderr
