"""A model whose output is known: it goes greedily along scripts, token by token.

Its layers add nothing and its head maps each token to a chosen next one, so no token may have two.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.helpers import make_tiny_llama

VOCAB = 512


def make_scripted(folder: Path, scripts: Iterable[Sequence[int]], second_best: Iterable[tuple[int, int]] = ()) -> Path:
    """A checkpoint that follows `scripts`; after the last token of one, all ids are equal and 0 comes.

    Embeddings are one-hot and attention and MLP give zero, so each row of hidden states is the last token itself, and the
    head's column for it holds 1 for its next token, 0.5 for the second best and 0 for all others.
    """
    make_tiny_llama(
        folder, hidden_size=VOCAB, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    path = folder / "model.safetensors"
    weights = load_file(path)
    head = torch.zeros(VOCAB, VOCAB)
    for script in scripts:
        for token_id, following in pairwise(script):
            assert not head[:, token_id].any(), f"{token_id} already has a next token"
            head[following, token_id] = 1
    for token_id, following in second_best:
        head[following, token_id] = 0.5
    weights |= {
        "model.embed_tokens.weight": torch.eye(VOCAB),
        "model.norm.weight": torch.ones(VOCAB),
        "lm_head.weight": head,
    }
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def add_words(folder: Path, words: Sequence[str]) -> None:
    """Give the byte tokenizer tokens of several ASCII letters, from id 256 on; the special ones move up behind them."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {word: 256 + index for index, word in enumerate(words)}
    for token in tokenizer["added_tokens"]:
        token["id"] += len(words)
    path.write_text(json.dumps(tokenizer))


def edit_json(path: Path, **changes: Any) -> None:
    """A value of ... leaves the key out."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids_of(folder: Path, text: str) -> list[int]:
    return tokenizer_of(folder).encode(text).ids


def texts_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """The text each piece completes, and at the end what is left of an unfinished character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def expected_end(
    pieces: Sequence[bytes], stop: tuple[str, ...], min_tokens: int, max_tokens: int
) -> tuple[str, int, str]:
    """Text, number of tokens and finish reason of a script that ends with EOS, found character by character.

    Args:
        pieces: the bytes of each token.
        min_tokens: at most the length of the script.
    """
    *texts, rest = texts_of(pieces[:max_tokens])
    so_far = ""
    for count, text in enumerate(texts, 1):
        for character in text:
            so_far += character
            complete = [len(candidate) for candidate in stop if so_far.endswith(candidate)]
            if complete and count >= min_tokens:
                return so_far[: -max(complete)], count, "stop"
    return so_far + rest, len(texts), "length" if len(texts) == max_tokens else "stop"


def may_begin_a_stop(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of `stop` begins with, without being complete."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
