"""Streams of tokens and stop strings: the joined deltas are the text, however the tokens come.

Token by token, decoding tears characters apart, drops the spaces before words, and sends a character twice where it has to
be taken back (antonellof/ferrox#124, huggingface/transformers#28776, sgl-project/sglang#31598); a stop string over several
tokens leaks its beginning, or its near miss is lost (vllm-project/vllm#3574, ggml-org/llama.cpp#9867).
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from backend.detokenizer import StopStringFilter, stream_factory
from backend.errors import ModelError

TEXTS = [
    "👨‍👩‍👧 family, 🏳️‍🌈 and 🇩🇪🇫🇷 flags",
    "A 世a界 mixed 中文text",
    "ďáblík ď e\u0301",
    "שלום עולם",
    "안녕하세요",
    "def f(x):\n    if x:\n        return '  '\n",
    "\n😀\n\n😀",
    "   leading and trailing   ",
    "U+FFFD \ufffd itself",
    "",
]


def byte_level() -> Tokenizer:
    """One token per byte, some merges, special tokens, and added tokens that are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "a"), ("i", "n")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("é"), AddedToken("日本"), AddedToken("Ġx")])
    return tokenizer


def sentence_piece(first: str = "strip") -> Tokenizer:
    """As in Llama 2: pieces with ▁ for a space, a token for each byte, and no space before the first word."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁▁", "▁a", "e", "中", "▁the", "\n", ".", "ab"]
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    if first == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("▁added▁text", normalized=False), AddedToken("  ", normalized=False)])
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "sentence piece": sentence_piece(),
    "metaspace": sentence_piece("metaspace"),
}
STREAMS = {name: stream_factory(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def check_stream(name: str, ids: list[int], sizes: list[int]) -> None:
    """Push `ids` in groups of `sizes`, in turn; everything that a stream promises must hold."""
    whole = TOKENIZERS[name].decode(ids)
    stream = STREAMS[name]()
    deltas, rest, cycle = [], ids, itertools.cycle(sizes)
    while rest:
        size = next(cycle)
        deltas.append(stream.push(rest[:size]))
        rest = rest[size:]
        assert whole.startswith("".join(deltas)), "a delta would have to be taken back"
    deltas.append(stream.flush())
    assert "".join(deltas) == whole
    assert stream.flush() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_joined_deltas_are_the_decoded_text(name: str, data: st.DataObject) -> None:
    """Any ids at all: broken characters, special and unknown ids, in groups as speculation makes them."""
    size = TOKENIZERS[name].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=30))
    check_stream(name, ids, data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))


@pytest.mark.parametrize("name", ["sentence piece", "metaspace"])
@given(data=st.data())
def test_byte_runs_and_first_spaces(name: str, data: st.DataObject) -> None:
    """Ids that matter to these decoders, far more often than chance gives them."""
    vocab = TOKENIZERS[name].get_vocab()
    emoji = [vocab[f"<0x{byte:02X}>"] for byte in "😀é".encode()]
    ids = data.draw(
        st.lists(st.sampled_from([*emoji, vocab["▁"], vocab["▁▁"], vocab["a"], vocab["</s>"]]), max_size=12)
    )
    check_stream(name, ids, data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_survives_in_every_grouping(name: str, text: str, size: int) -> None:
    check_stream(name, TOKENIZERS[name].encode(text).ids, [size])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_output_cut_in_the_middle_of_a_character(name: str) -> None:
    ids = TOKENIZERS[name].encode("a😀").ids
    for length in range(len(ids) + 1):
        check_stream(name, ids[:length], [1])


def test_no_replacement_character_before_the_end() -> None:
    stream = STREAMS["byte level"]()
    ids = TOKENIZERS["byte level"].encode("x🇩🇪").ids
    deltas = [stream.push([token_id]) for token_id in ids]
    assert deltas[0] == "x"
    assert "".join(deltas) == "x🇩🇪"
    assert stream.flush() == ""


@pytest.mark.parametrize("name", ["byte level", "sentence piece"])
def test_plain_text_is_not_held_back(name: str) -> None:
    """Each id's text is out as soon as the id is in."""
    tokenizer = TOKENIZERS[name]
    stream = STREAMS[name]()
    ids = tokenizer.encode("a ab  a.").ids
    out = ""
    for count, token_id in enumerate(ids, 1):
        out += stream.push([token_id])
        assert out == tokenizer.decode(ids[:count])


def test_leading_spaces_of_later_words_are_kept() -> None:
    """Decoding each id by itself would drop them."""
    tokenizer = TOKENIZERS["sentence piece"]
    ids = tokenizer.encode("a a the").ids
    stream = STREAMS["sentence piece"]()
    assert "".join(stream.push([token_id]) for token_id in ids) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).count(" ") == 2


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.CTC(), decoders.Strip(" ", 0, 1), decoders.Replace(Regex("a+"), "b")],
    ids=["none", "WordPiece", "CTC", "strip at the end", "regular expression"],
)
def test_decoders_that_look_ahead_are_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="cannot be streamed; supported: byte-level BPE and SentencePiece"):
        stream_factory(tokenizer)


# ---- stop strings ----


def expected_text(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Character by character: the first stop string to be complete ends the text; of several, the longest."""
    for end in range(len(text) + 1):
        complete = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def may_begin_a_stop(text: str, stop: tuple[str, ...]) -> int:
    return max(
        (
            n
            for n in range(len(text) + 1)
            if any(s != text[len(text) - n :] and s.startswith(text[len(text) - n :]) for s in stop)
        ),
        default=0,
    )


def run_filter(deltas: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    """The released text, checked at each step for being held back no longer than needed."""
    stop_filter = StopStringFilter(stop)
    released, seen = "", ""
    for delta in deltas:
        text, stopped = stop_filter.push(delta)
        released += text
        seen += delta
        if stopped:
            assert stop_filter.push("more") == ("", True)
            assert stop_filter.flush() == ""
            return released, True
        assert len(released) == len(seen) - may_begin_a_stop(seen, stop)
    return released + stop_filter.flush(), False


def cut(text: str, sizes: list[int]) -> list[str]:
    deltas, cycle = [], itertools.cycle(sizes)
    while text:
        size = next(cycle)
        deltas.append(text[:size])
        text = text[size:]
    return deltas


@given(
    text=st.text("ab\n", max_size=14),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_text_up_to_the_first_stop_however_it_is_cut(text: str, stop: list[str], sizes: list[int]) -> None:
    assert run_filter(cut(text, sizes), tuple(stop)) == expected_text(text, tuple(stop))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 11])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("ABCDEFGHIJK", ("DEFGHIJ",), "ABC", True),
        ("ABCDEFGHIJK", ("EFX",), "ABCDEFGHIJK", False),
        ("ABCDEFGHIJK", ("DEF", "DEFGH"), "ABC", True),
        ("ABCDEFGHIJK", ("DEFGX", "FG"), "ABCDE", True),
        ("ABCDEFGHIJK", ("CDE", "E"), "AB", True),
        ("ABCDEFGHIJK", ("BCDE", "C"), "AB", True),
        ("one\ntwo", ("\n",), "one", True),
        ("one\n\ntwo", ("\n\n",), "one", True),
        ("hi 😀 there", ("😀",), "hi ", True),
        ("stop", ("stop",), "", True),
        ("aaab", ("aab",), "a", True),
        ("held to the end: DE", ("DEF",), "held to the end: DE", False),
        ("no stop", (), "no stop", False),
    ],
)
def test_known_cases(text: str, stop: tuple[str, ...], expected: str, stopped: bool, size: int) -> None:
    assert run_filter(cut(text, [size]), stop) == (expected, stopped)
    assert expected_text(text, stop) == (expected, stopped)


def test_a_near_miss_is_released_as_soon_as_it_misses() -> None:
    stop_filter = StopStringFilter(("EFX",))
    assert stop_filter.push("ABCDE") == ("ABCD", False)
    assert stop_filter.push("F") == ("", False)
    assert stop_filter.push("G") == ("EFG", False)
    assert stop_filter.flush() == ""


def test_text_held_back_comes_out_at_the_end_once() -> None:
    stop_filter = StopStringFilter(("DEF",))
    assert stop_filter.push("xDE") == ("x", False)
    assert stop_filter.flush() == "DE"
    assert stop_filter.flush() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    stop_filter = StopStringFilter(())
    assert stop_filter.push("anything") == ("anything", False)
    assert stop_filter.flush() == ""
