"""Published models and known cards to size without their files: each with where its figures are from.

A config holds the fields that decide sizes, as the model's own config.json names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ModelPreset:
    config: dict[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class CardPreset:
    memory_bytes: int
    source: str


_LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LLAMA_3_1_8B = _LLAMA_3_8B | {"max_position_embeddings": 131072}
_LLAMA_3_1_70B = _LLAMA_3_1_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_QWEN_2_5_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN_3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MISTRAL_7B_V0_1: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MIXTRAL_8X7B = _MISTRAL_7B_V0_1 | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
# Its file gives only what differs from the defaults of the family: heads, head size and vocabulary are among those.
_GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
}

MODEL_PRESETS: dict[str, ModelPreset] = {
    name: ModelPreset(config, f"config.json of {repository} on Hugging Face")
    for name, config, repository in (
        ("Llama-3.1-8B", _LLAMA_3_1_8B, "meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-70B", _LLAMA_3_1_70B, "meta-llama/Llama-3.1-70B"),
        ("Llama-3-8B", _LLAMA_3_8B, "meta-llama/Meta-Llama-3-8B"),
        ("SmolLM2-135M", _SMOLLM2_135M, "HuggingFaceTB/SmolLM2-135M"),
        ("Qwen2.5-7B", _QWEN_2_5_7B, "Qwen/Qwen2.5-7B"),
        ("Qwen3-8B", _QWEN_3_8B, "Qwen/Qwen3-8B"),
        ("Mistral-7B-v0.1", _MISTRAL_7B_V0_1, "mistralai/Mistral-7B-v0.1"),
        ("Mixtral-8x7B", _MIXTRAL_8X7B, "mistralai/Mixtral-8x7B-v0.1"),
        ("Gemma-3-4B", _GEMMA_3_4B, "google/gemma-3-4b-pt"),
        ("DeepSeek-V3", _DEEPSEEK_V3, "deepseek-ai/DeepSeek-V3"),
        ("GPT-2", _GPT2, "openai-community/gpt2"),
    )
}

# What a card has is a little less, or a little more, than the number in its name.
CARD_PRESETS: dict[str, CardPreset] = {
    name: CardPreset(mib * MIB, f"{mib:,} MiB in all, as nvidia-smi reports of {product}")
    for name, mib, product in (
        ("H100 80 GB", 81_559, "an H100 80GB HBM3"),
        ("H200 141 GB", 143_771, "an H200"),
        ("A100 80 GB", 81_920, "an A100-SXM4-80GB"),
        ("A100 40 GB", 40_960, "an A100-SXM4-40GB"),
        ("L4 24 GB", 23_034, "an L4"),
        ("RTX 4090 24 GB", 24_564, "a GeForce RTX 4090"),
        ("RTX 5090 32 GB", 32_607, "a GeForce RTX 5090"),
    )
}
