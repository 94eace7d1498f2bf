"""Text to token ids and back: one protocol for real models and for dummies.

The `tokenizers` library is used directly, and the chat template is rendered as transformers does; importing transformers
for that would cost over a second at each start. Tests hold both to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from backend.chat_template import ChatTemplate, token_text
from backend.detokenizer import SilentStream, TokenStream, stream_factory
from backend.errors import ModelError, RequestError
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import load_decoder_config
from backend.models.sources import ModelSource


class Tokenizer(Protocol):
    """Safe to use from several threads.

    Attributes:
        vocab_size: ids are below this; the model's size, which may exceed the number of tokens.
        eos_token_ids: ids that end an output.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt; nothing is added. Special tokens written out in the text become their ids."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation by the model's chat template, ending where the assistant is to answer.

        Args:
            messages: each {"role": ..., "content": ...}.

        Raises:
            RequestError: the model has no chat template, or its template refuses the conversation.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def new_stream(self) -> TokenStream:
        """A stream for one output; its text equals `decode` of all its ids."""
        ...


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that belongs to a model.

    Raises:
        ModelError: files are missing or damaged, or the tokenizer has ids that the model has not.
    """
    if source.path is not None:
        return FolderTokenizer(source.name, source.path)
    assert source.shape is not None  # resolve_source sees to it
    return ByteTokenizer(DUMMY_SHAPES[source.shape].vocab_size)


class ByteTokenizer:
    """For models with random weights: text goes in as its UTF-8 bytes, and the ids that come out stand for no text."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [byte % self.vocab_size for byte in _check_text(text).encode()]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Without a template, each message is a line `role: content`."""
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def new_stream(self) -> TokenStream:
        return SilentStream()


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json and, if there, chat_template.jinja."""

    def __init__(self, name: str, folder: Path) -> None:
        """Load it. Raises `ModelError`."""
        self._name = name
        self._tokenizer = _load_tokenizer_json(folder)
        tokenizer_config = _read_tokenizer_config(folder)
        model_config = load_decoder_config(folder)
        self.vocab_size = model_config.vocab_size
        _check_highest_id(folder, self._tokenizer, self.vocab_size)
        # Chat models name the end of a turn in any one of their three files.
        self.eos_token_ids = model_config.eos_token_ids | _eos_token_id(folder, self._tokenizer, tokenizer_config)
        self._template = ChatTemplate.load(folder, tokenizer_config)
        self.new_stream: Callable[[], TokenStream] = _stream_factory(folder, self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(_check_text(text), add_special_tokens=False).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self._template is None:
            raise RequestError(f"{self._name} has no chat template; use raw prompts with this model")
        return self.encode(self._template.render(messages))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _load_tokenizer_json(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the model's tokenizer there in the fast format")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for whatever it cannot read
        raise ModelError(f"{path} is not a tokenizer: {error}") from None
    # A file may store how its training batches were cut and filled up; a prompt is neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_highest_id(folder: Path, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has ids up to {highest}, but the model's vocabulary has {vocab_size} tokens; "
            "they do not belong together"
        )


def _eos_token_id(folder: Path, tokenizer: tokenizers.Tokenizer, tokenizer_config: dict[str, Any]) -> frozenset[int]:
    """The id of the end-of-sequence token that tokenizer_config.json names, if it names one."""
    token = token_text(tokenizer_config.get("eos_token"))
    if token is None:
        return frozenset()
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ModelError(
            f"{folder}: the tokenizer has no token {token!r}, which tokenizer_config.json names as its end"
        )
    return frozenset({token_id})


def _stream_factory(folder: Path, tokenizer: tokenizers.Tokenizer) -> Callable[[], TokenStream]:
    try:
        return stream_factory(tokenizer)
    except ModelError as error:
        raise ModelError(f"{folder / 'tokenizer.json'}: {error}") from None


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _check_text(text: str) -> str:
    """Refuse half characters, which have no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate {text[error.start]!r} at character {error.start}, which is not Unicode text"
        ) from None
    return text
