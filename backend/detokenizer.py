"""From output token ids to text, as they come.

`TokenStream` turns ids into deltas: the joined deltas and the final flush equal the tokenizer's decode of all ids, for
every way of grouping the pushes. What later ids could still change is held back, so a delta is never taken back and holds
U+FFFD only where the whole text does. `StopStringFilter` ends the text at the first stop string.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from backend.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenStream(Protocol):
    """The text of one growing sequence of output ids. Special and unknown ids have no text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids; returns the text that has become certain."""
        ...

    def flush(self) -> str:
        """End the sequence; returns the rest of its text."""
        ...


class StopStringFilter:
    """Ends a stream of text at the first stop string to be completed, and leaves that out.

    Where several are completed by the same character, the one that began first counts. The result does not depend on how
    the text is cut into deltas, and no text beyond the completing character is needed to find it. Text is held back only
    while it may be the beginning of a stop string.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self._stopped = False

    def push(self, delta: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Add text; returns (released text, whether a stop string has ended the stream).

        A stop string that is complete while `may_end` is False is text like any other; one that has only begun may still
        end the stream later.
        """
        if self._stopped:
            return "", True
        if not self._stop:
            return delta, False
        text = self._held + delta
        # What was complete within the held text has had its chance: only a match that ends behind it is new.
        found = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := text.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
        ]
        if found and may_end:
            self._stopped = True
            self._held = ""
            return text[: min(found)[1]], True
        kept = self._beginning_of_stop(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def flush(self) -> str:
        """End the stream; returns the text held back, which no stop string can begin with any more."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(len(stop) for stop in self._stop) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return len(text) - start
        return 0


class SilentStream:
    """The stream of a model whose ids stand for no text."""

    def push(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def stream_factory(tokenizer: Tokenizer) -> Callable[[], TokenStream]:
    """A function that opens streams for `tokenizer`. Raises `ModelError` for kinds of decoding that are not supported."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        pieces = _BytePieces(tokenizer)
        return lambda: _ByteLevelStream(pieces)
    if kinds and all(_is_incremental(step) for step in steps):
        pieces = _TextPieces(tokenizer, strips_first="Strip" in kinds or "Metaspace" in kinds)
        return lambda: _TextPieceStream(pieces)
    raise ModelError(
        f"the tokenizer decodes by {' + '.join(kinds) or 'nothing'}, which cannot be streamed; "
        "supported: byte-level BPE and SentencePiece tokenizers"
    )


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_incremental(step: dict[str, Any]) -> bool:
    """Whether a decoding step looks at one token, one run of byte tokens, or the start of the text at a time."""
    match step["type"]:
        case "ByteFallback" | "Fuse" | "Metaspace":
            return True
        case "Replace":
            return len(step["pattern"].get("String", "")) == 1
        case "Strip":
            return step["stop"] == 0
    return False


def _plain_ids(tokenizer: Tokenizer) -> Callable[[int], str | None]:
    """Looks up the token of an id; None for ids that have no text: special and unknown ones."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return lambda token_id: None if token_id in special else tokenizer.id_to_token(token_id)


class _BytePieces(dict[int, "str | bytes"]):
    """What each id stands for in a byte-level vocabulary, found on first use: text where its bytes are whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._token = _plain_ids(tokenizer)

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._token(token_id) or ""
        try:
            piece: str | bytes = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            piece = piece.decode()
        except KeyError:  # an added token that was never written in the byte alphabet stands for its own text
            piece = token
        except UnicodeDecodeError:  # part of a character
            pass
        self[token_id] = piece
        return piece


class _ByteLevelStream:
    """Byte-level BPE: the ids' bytes in a row are UTF-8, and a character is certain with its last byte."""

    def __init__(self, pieces: _BytePieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within = False  # a character has begun and not ended

    def push(self, token_ids: Iterable[int]) -> str:
        pieces, text = self._pieces, ""
        for token_id in token_ids:
            piece = pieces[token_id]
            # Between characters a piece that is whole characters is its own text: nearly every token.
            text += self._decode(piece) if self._within or isinstance(piece, bytes) else piece
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _decode(self, piece: str | bytes) -> str:
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._within = bool(self._decoder.getstate()[0])
        return text


class _TextPieces(dict[int, str]):
    """The text each id has inside a text, for vocabularies of pieces of text such as SentencePiece's.

    A piece's text may depend on whether it is the first, so it is what the tokenizer adds after another piece.
    """

    def __init__(self, tokenizer: Tokenizer, *, strips_first: bool) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.strips_first = strips_first
        self.token = _plain_ids(tokenizer)
        self._byte_ids = {i for token, i in tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(token)}
        self._anchor = next(
            i for token, i in sorted(tokenizer.get_vocab().items()) if token.isalnum() and self.token(i) is not None
        )
        self._anchor_text = tokenizer.decode([self._anchor])

    def __missing__(self, token_id: int) -> str:
        self[token_id] = text = self.inner_text([token_id])
        return text

    def inner_text(self, token_ids: Sequence[int]) -> str:
        """Text of ids that follow others."""
        return self.tokenizer.decode([self._anchor, *token_ids]).removeprefix(self._anchor_text)

    def is_byte(self, token_id: int) -> bool:
        return token_id in self._byte_ids


class _TextPieceStream:
    """Pieces of text, with single bytes as ids of their own for characters that have no piece.

    A run of byte ids is valid UTF-8 as a whole or decodes to one U+FFFD for each byte, so it is held back until it ends.
    So are the first ids while they give no text, since the space before the first word is dropped.
    """

    def __init__(self, pieces: _TextPieces) -> None:
        self._pieces = pieces
        self._first: list[int] | None = [] if pieces.strips_first else None
        self._run: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        text = ""
        for token_id in token_ids:
            if self._pieces.token(token_id) is None:
                continue
            if self._pieces.is_byte(token_id):
                self._run.append(token_id)
                continue
            text += self._end_run()
            text += self._pieces[token_id] if self._first is None else self._begin([token_id])
        return text

    def flush(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        run, self._run = self._run, []
        if not run:
            return ""
        return self._pieces.inner_text(run) if self._first is None else self._begin(run)

    def _begin(self, token_ids: list[int]) -> str:
        """Add ids while no text has come out yet."""
        first = (self._first or []) + token_ids
        text = self._pieces.tokenizer.decode(first)
        self._first = None if text else first
        return text


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary (GPT-2): printable ones for themselves, the others,
    in order, for those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
