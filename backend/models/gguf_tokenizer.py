"""The tokenizer in a GGUF file's metadata -> `tokenizer.json` and `tokenizer_config.json`.

Only byte-level BPE with a pre-tokenizer that is known exactly: a wrong split gives plausible but different token ids.
"""

from __future__ import annotations

import json
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from backend.errors import ModelError
from backend.models.gguf_file import GGUFFile

# Llama 3's split (github.com/meta-llama/llama3, llama/tokenizer.py): contractions, words with one leading symbol, up to
# three digits, symbols, line ends, other white space.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer_files(file: GGUFFile) -> dict[str, str]:
    """Contents of the tokenizer's files by name. Raises `ModelError` for tokenizers that are not supported."""
    tokens = file.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        # A class of its own name would make transformers build its own pre-tokenizer in place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.get("llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_prefix_space": False,
    }
    for name, key in _SPECIAL_TOKENS.items():
        if file.has(f"tokenizer.ggml.{key}"):
            config[name] = tokens[_token_id(file, key, len(tokens))]
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.get("tokenizer.chat_template", str)
    return {
        "tokenizer.json": _build_tokenizer(file, tokens).to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def ending_token_ids(file: GGUFFile) -> list[int]:
    """Ids that end a generation: end of sequence, of turn and of message, as far as the metadata names them."""
    size = len(file.strings("tokenizer.ggml.tokens"))
    keys = [key for key in ("eos_token_id", "eot_token_id", "eom_token_id") if file.has(f"tokenizer.ggml.{key}")]
    return sorted({_token_id(file, key, size) for key in keys})


def _token_id(file: GGUFFile, key: str, num_tokens: int) -> int:
    token_id = file.get(f"tokenizer.ggml.{key}", int)
    if not 0 <= token_id < num_tokens:
        raise ModelError(f"{file.path}: tokenizer.ggml.{key} = {token_id}, but there are {num_tokens} tokens")
    return token_id


def _build_tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelError(f"{file.path} has a tokenizer of kind {model!r}; supported: 'gpt2' (byte-level BPE)")
    split = file.get("tokenizer.ggml.pre", str, "default")
    types = file.get("tokenizer.ggml.token_type", list)
    merges = [
        (left, right) for left, _, right in (text.partition(" ") for text in file.strings("tokenizer.ggml.merges"))
    ]
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types")

    # Unused entries fill the vocabulary up to the model's size: no text gives them and they give no text.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    try:
        bpe = models.BPE(vocab, merges, ignore_merges=split == "llama-bpe")
    except Exception as error:  # the library raises a bare Exception for a merge of unknown tokens
        raise ModelError(f"{file.path} has a tokenizer whose merges do not fit its tokens: {error}") from None
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(file, split)
    tokenizer.decoder = decoders.ByteLevel()
    for i, token in enumerate(tokens):  # one by one: neighbours of different kinds keep their ids this way
        if types[i] == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif types[i] == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _pre_tokenizer(file: GGUFFile, split: str) -> Any:
    match split:
        case "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        case "llama-bpe":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
    raise ModelError(f"{file.path} has the pre-tokenizer {split!r}; supported: 'smollm', 'llama-bpe'")
