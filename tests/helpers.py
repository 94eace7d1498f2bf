"""Tiny random checkpoints and the transformers oracle that the tests compare with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from backend.models.decoder import Decoder

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 72,
    "intermediate_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
}

TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_llama(folder: str | Path, **changes: Any) -> Path:
    """`make_tiny_model` of architecture Llama."""
    return make_tiny_model(folder, "Llama", **changes)


def make_tiny_model(
    folder: str | Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Save a random model (9 query and 3 KV heads of 8, 3 layers, 512 tokens) with a byte-level tokenizer.

    Every parameter is random, norms and biases included, at a scale where logits have a spread of about 3: a tensor
    that is dropped, swapped or mis-shaped moves them far beyond any tolerance.

    Args:
        folder: created when missing.
        architecture: transformers' name of it, "Llama" of LlamaConfig and LlamaForCausalLM.
        max_shard_size: as in transformers; "100KB" gives a sharded checkpoint with an index.
        config_overrides: any field of its config, over `TINY_LLAMA`. `eos_token_id` reaches both config.json and
            generation_config.json.
    """
    import transformers

    folder = Path(folder)
    config = getattr(transformers, f"{architecture}Config")(**(TINY_LLAMA | config_overrides))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name and not model.config.tie_word_embeddings:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        if not model.config.tie_word_embeddings:
            model.lm_head.weight.mul_(3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    _save_byte_tokenizer(folder)
    return folder


def load_oracle(folder: str | Path) -> LlamaForCausalLM:
    """The checkpoint in transformers: fp32, plain attention, and its `generate` never stops at an EOS id."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def dense_logits(folder_or_model: str | Path | LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """fp32 logits [len(token_ids), vocab_size] of one whole forward pass in transformers."""
    model = _oracle(folder_or_model)
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.inference_mode()
def dense_greedy(folder_or_model: str | Path | LlamaForCausalLM, prompt_ids: list[int], n: int) -> list[int]:
    """The `n` ids that transformers chooses greedily after `prompt_ids`; EOS ids do not end it."""
    model = _oracle(folder_or_model)
    inputs = torch.tensor([prompt_ids])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=n)
    return output[0, len(prompt_ids) :].tolist()


def assert_greedy(
    folder_or_model: str | Path | LlamaForCausalLM, prompt_ids: list[int], token_ids: list[int], max_gap: float = 1e-3
) -> None:
    """Check that `token_ids` is a greedy continuation of `prompt_ids`, by one pass over both.

    The first id that is not transformers' choice is excused only where its two best logits lie within `max_gap`; what
    follows such a place is not compared.
    """
    logits = dense_logits(folder_or_model, prompt_ids + token_ids)[len(prompt_ids) - 1 : -1]
    best = logits.argmax(-1)
    for index, token_id in enumerate(token_ids):
        if token_id != best[index]:
            top = logits[index].topk(2).values
            gap = float(top[0] - top[1])
            assert gap < max_gap, f"id {index} is {token_id}, not {int(best[index])} (top-2 gap {gap:.2e})"
            return


def paged_logits(
    model: Decoder, token_ids: list[int], *, chunk_sizes: list[int] | None = None, block_size: int = 16
) -> Tensor:
    """fp32 logits [len(token_ids), vocab_size] of one request through a paged cache with shuffled blocks.

    Args:
        chunk_sizes: tokens per step, in order; by default all in one step.
    """
    from backend.attention.metadata import AttentionMetadata, LayerCache
    from backend.attention.reference import ReferenceAttention

    config, num_tokens = model.config, len(token_ids)
    num_blocks = -(-num_tokens // block_size)
    block_ids = 1 + torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_tokens))
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    dtype = model.final_norm.weight.dtype
    layer_caches = [
        replace(LayerCache.zeros(*shape, dtype, torch.device("cpu")), window=window) for window in config.windows
    ]
    logits, start = [], 0
    for size in chunk_sizes or [num_tokens]:
        end = start + size
        positions = torch.arange(start, end)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, size], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=block_ids[None].int(),
            slot_mapping=block_ids[positions // block_size] * block_size + positions % block_size,
            positions=positions,
            num_decodes=0,
        )
        hidden = model(torch.tensor(token_ids[start:end]), positions, layer_caches, metadata, ReferenceAttention())
        logits.append(model.compute_logits(hidden))
        start = end
    assert start == num_tokens
    return torch.cat(logits)


def _oracle(folder_or_model: str | Path | LlamaForCausalLM) -> LlamaForCausalLM:
    return load_oracle(folder_or_model) if isinstance(folder_or_model, str | Path) else folder_or_model


def _save_byte_tokenizer(folder: Path) -> None:
    """One token per byte (ids 0-255), then <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TINY_CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
