"""How an output ends, through the whole engine: EOS ids from every file, stop strings, limits, half characters."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.errors import ModelError, RequestError
from tests.engine.driving import Answer, check_idle, config_of, submit
from tests.engine.scripted import (
    VOCAB,
    add_words,
    edit_json,
    expected_end,
    ids_of,
    make_scripted,
    may_begin_a_stop,
    texts_of,
    tokenizer_of,
)
from tests.helpers import make_tiny_llama

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
START = 400  # ids from 261 on stand for no text; those from here on begin a script
NO_TEXT = 300


def end_of(answer: Answer) -> tuple[str, int, str | None]:
    assert answer.last is not None
    return answer.text, len(answer.token_ids), answer.finish_reason


# Every id that any file names as the end: to read only one of them, or only the first (oobabooga/textgen#5885,
# vllm-project/vllm#4182), lets a chat run on into a second turn.

EOS_IDS = {"endoftext": ENDOFTEXT, "im_start": IM_START, "im_end": IM_END, "text": 57, "no text": NO_TEXT}
LETTERS = dict(zip(EOS_IDS, "abcde", strict=True))


@pytest.fixture(scope="module")
def eos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One script per id: a start, a letter, the id, and then 'y' for ever. Id 57 is 'Z'."""
    folder = tmp_path_factory.mktemp("eos")
    make_tiny_llama(folder)  # for its tokenizer
    assert ids_of(folder, "Z") == [57]
    (again,) = ids_of(folder, "y")
    scripts = [
        [START + index, *ids_of(folder, LETTERS[name]), token_id, again]
        for index, (name, token_id) in enumerate(EOS_IDS.items())
    ]
    return make_scripted(folder, [*scripts, [again, again]])


def with_eos(model: Path, folder: Path, config: Any, generation: Any, tokenizer: Any) -> Path:
    shutil.copytree(model, folder)
    edit_json(folder / "config.json", eos_token_id=config)
    edit_json(folder / "generation_config.json", eos_token_id=generation)
    edit_json(folder / "tokenizer_config.json", eos_token=tokenizer)
    return folder


def run_all(host: EngineHost, **sampling: Any) -> dict[str, Answer]:
    """One request per id that might end it."""
    collected = {name: submit(host, name, [START + i], **sampling) for i, name in enumerate(EOS_IDS)}
    for answer in collected.values():
        assert answer.last is not None
    check_idle(host)
    return collected


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "union"),
    [
        pytest.param(IM_END, ..., ..., {"im_end"}, id="int"),
        pytest.param([ENDOFTEXT, IM_START, 57], ..., ..., {"endoftext", "im_start", "text"}, id="list of three"),
        pytest.param(
            ENDOFTEXT, [IM_START, NO_TEXT], "<|im_end|>", {"endoftext", "im_start", "no text", "im_end"}, id="disagree"
        ),
        pytest.param(..., 57, ..., {"text"}, id="generation_config alone"),
        pytest.param(None, None, {"content": "<|im_end|>"}, {"im_end"}, id="tokenizer alone, nulls elsewhere"),
        pytest.param([IM_END, IM_END], [IM_END], "<|im_end|>", {"im_end"}, id="agree"),
        pytest.param(..., ..., ..., set(), id="absent everywhere"),
    ],
)
def test_each_id_of_the_union_ends_the_output_and_is_not_in_it(
    host: EngineHost, eos_model: Path, tmp_path: Path, config: Any, generation: Any, tokenizer: Any, union: set[str]
) -> None:
    host.load(config_of(with_eos(eos_model, tmp_path / "model", config, generation, tokenizer)))
    letter_ids = {name: ids_of(eos_model, letter)[0] for name, letter in LETTERS.items()}
    (again,) = ids_of(eos_model, "y")
    run_on = {name: LETTERS[name] + ("Z" if name == "text" else "") + "yyyy" for name in EOS_IDS}
    for name, answer in run_all(host, max_tokens=6).items():
        if name in union:
            assert (answer.token_ids, answer.text) == ([letter_ids[name]], LETTERS[name])
            assert answer.finish_reason == "stop"
        else:
            assert answer.token_ids == [letter_ids[name], EOS_IDS[name], *[again] * 4]
            assert (answer.text, answer.finish_reason) == (run_on[name], "length")
    for name, answer in run_all(host, max_tokens=6, ignore_eos=True).items():
        assert answer.token_ids == [letter_ids[name], EOS_IDS[name], *[again] * 4]
        assert (answer.text, answer.finish_reason) == (run_on[name], "length")


def test_ignoring_eos_leaves_the_request_s_own_stop_ids(host: EngineHost, eos_model: Path) -> None:
    host.load(config_of(eos_model))
    stop_ids = (IM_START, IM_END, NO_TEXT)
    for name, answer in run_all(host, max_tokens=6, ignore_eos=True, stop_token_ids=stop_ids).items():
        ends = EOS_IDS[name] in stop_ids
        assert answer.finish_reason == ("stop" if ends else "length")
        assert len(answer.token_ids) == (1 if ends else 6)


def test_an_eos_id_outside_the_vocabulary_is_named_when_the_model_is_loaded(
    host: EngineHost, eos_model: Path, tmp_path: Path
) -> None:
    folder = with_eos(eos_model, tmp_path / "model", IM_END, [IM_END, VOCAB], ...)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id 512 is outside"):
        host.load(config_of(folder))


# Scripts for stop strings: no byte comes twice, for a token has one next token only

SCRIPTS = {
    "letters": [bytes([byte]) for byte in b"ABCDEFGHIJK"],
    "after K": [bytes([byte]) for byte in b"LMN"],
    "emoji": [bytes([byte]) for byte in "xyz😀uv".encode()],
    "lines": [bytes([byte]) for byte in b"one\ntw"],
    "pieces": [b"Q", b"RST", b"UVW"],
    "half": [b"a", "é".encode()[:1]],
}
STARTS = {name: START + index for index, name in enumerate(SCRIPTS)}
WORDS = ["RST", "UVW"]
EOS = 258  # in config.json, and the first id behind the words


@pytest.fixture(scope="module")
def id_of_piece(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, int]:
    """The id of each piece of the scripts in the byte tokenizer with `WORDS`."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("tokenizer"))
    known = {text.encode(): ids_of(folder, text) for text in (*map(chr, range(128)), "😀", "é")}
    ids = {whole[n : n + 1]: token_id for whole, ids in known.items() for n, token_id in enumerate(ids)}
    return ids | {word.encode(): 256 + index for index, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def script_ids(id_of_piece: dict[bytes, int]) -> dict[str, list[int]]:
    return {name: [id_of_piece[piece] for piece in pieces] for name, pieces in SCRIPTS.items()}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, script_ids: dict[str, list[int]]) -> Path:
    """Every script begins with its start and ends with EOS; K, the last of the letters, is else followed by L."""
    folder = tmp_path_factory.mktemp("scripted")
    scripts = [[STARTS[name], *ids, EOS] for name, ids in script_ids.items()]
    make_scripted(folder, scripts, second_best=[(script_ids["letters"][-1], script_ids["after K"][0])])
    add_words(folder, WORDS)
    return folder


@pytest.fixture
def engine(host: EngineHost, scripted: Path) -> EngineHost:
    host.load(config_of(scripted))
    return host


def check_streamed(answer: Answer, pieces: Sequence[bytes], stop: tuple[str, ...]) -> None:
    """Each delivery holds back what may still become a stop string, and no more."""
    seen = streamed = ""
    for event, text in zip(answer.events[:-1], texts_of(pieces), strict=False):
        seen += text
        streamed += event.text
        assert streamed == seen[: len(seen) - may_begin_a_stop(seen, stop)]


@pytest.mark.parametrize(
    ("script", "stop", "text", "count", "sampling"),
    [
        pytest.param("letters", ("DEFGHIJ",), "ABC", 10, {}, id="over seven tokens"),
        pytest.param("letters", ("EFX",), "ABCDEFGHIJK", 11, {}, id="near miss"),
        pytest.param("letters", ("DEF", "DEFGH"), "ABC", 6, {}, id="one begins the other"),
        pytest.param("letters", ("DEFGH", "DEF"), "ABC", 6, {}, id="one begins the other, the longer first"),
        pytest.param("letters", ("DEFGX", "FG"), "ABCDE", 7, {}, id="one inside the near miss of another"),
        pytest.param("letters", ("CDE", "E"), "AB", 5, {}, id="two ends at once"),
        pytest.param("letters", ("A",), "", 1, {}, id="the first token"),
        pytest.param("pieces", ("S",), "QR", 2, {}, id="inside a token"),
        pytest.param("pieces", ("TU",), "QRS", 3, {}, id="from inside a token into the next"),
        pytest.param("pieces", ("RSTUVW",), "Q", 3, {}, id="whole tokens"),
        pytest.param("pieces", ("VWX",), "QRSTUVW", 3, {}, id="near miss in a token at the end"),
        pytest.param("lines", ("\n",), "one", 4, {}, id="newline"),
        pytest.param("emoji", ("😀",), "xyz", 7, {}, id="emoji of four tokens"),
        pytest.param("emoji", ("z😀u",), "xy", 8, {}, id="emoji within"),
        pytest.param("emoji", ("😃",), "xyz😀uv", 9, {}, id="another emoji with the same first three bytes"),
        pytest.param("letters", ("K!",), "ABCDEFGHIJK", 11, {}, id="EOS with text held back"),
        pytest.param("letters", ("DX",), "ABCD", 4, {"stop_token_ids": (36,)}, id="stop id with text held back"),
        pytest.param("letters", ("DEF",), "ABC", 6, {"max_tokens": 6}, id="complete with the last token allowed"),
        pytest.param("letters", ("DEF",), "ABC", 6, {"min_tokens": 6}, id="begun before min_tokens"),
        pytest.param("letters", ("DEF",), "ABCDEFGHIJK", 11, {"min_tokens": 7}, id="complete before min_tokens"),
        pytest.param("letters", ("DEF", "JK"), "ABCDEFGHI", 11, {"min_tokens": 7}, id="the next one counts"),
        pytest.param("pieces", ("S", "V"), "QRSTU", 3, {"min_tokens": 3}, id="inside a token at min_tokens"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    engine: EngineHost,
    script_ids: dict[str, list[int]],
    script: str,
    stop: tuple[str, ...],
    text: str,
    count: int,
    sampling: dict[str, Any],
) -> None:
    assert script_ids["letters"][4] == 36, "E, the stop id of one case"
    answer = submit(engine, "a", [STARTS[script]], stop=stop, **sampling)
    assert end_of(answer) == (text, count, "stop")
    assert answer.token_ids == script_ids[script][:count], "tokens are counted, those of the stop string too"
    check_streamed(answer, SCRIPTS[script], stop)


def test_text_held_back_comes_out_when_the_limit_ends_the_output(engine: EngineHost) -> None:
    answer = submit(engine, "a", [STARTS["letters"]], stop=("DX", "CDY"), max_tokens=4)
    assert end_of(answer) == ("ABCD", 4, "length")
    assert [event.text for event in answer.events] == ["A", "B", "", "CD"]


def test_a_near_miss_is_delivered_with_the_token_that_decides(engine: EngineHost) -> None:
    answer = submit(engine, "a", [STARTS["letters"]], stop=("EFX",), max_tokens=8)
    assert end_of(answer) == ("ABCDEFGH", 8, "length")
    assert [event.text for event in answer.events] == ["A", "B", "C", "D", "", "", "EFG", "H"]


def test_a_stop_string_in_the_prompt_ends_nothing(engine: EngineHost, scripted: Path) -> None:
    """Nor does one that begins there: "qA" ends with the first token."""
    prompt = [*ids_of(scripted, "pqr stop DE q"), STARTS["letters"]]
    answer = submit(engine, "a", prompt, stop=("pqr", "stop", "qA", "q"))
    assert end_of(answer) == ("ABCDEFGHIJK", 11, "stop")


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "count"),
    [
        (("DE", "DEFX"), 6, "ABCDEFGHIJK", 11),
        (("C", "BCDE"), 4, "A", 5),
    ],
)
def test_a_stop_string_inside_the_beginning_of_another_does_not_count_before_min_tokens(
    engine: EngineHost, stop: tuple[str, ...], min_tokens: int, text: str, count: int
) -> None:
    answer = submit(engine, "a", [STARTS["letters"]], stop=stop, min_tokens=min_tokens)
    assert end_of(answer) == (text, count, "stop")


def test_random_stops_and_limits_end_where_the_text_says(engine: EngineHost) -> None:
    """Side by side in one engine, each against a search character by character."""
    rng = random.Random(5)
    cases = []
    for index in range(200):
        name, pieces = rng.choice(list(SCRIPTS.items()))
        whole = b"".join(pieces).decode(errors="ignore")
        min_tokens = rng.choice([0, 0, rng.randint(0, len(pieces))])
        max_tokens = rng.randint(max(1, min_tokens), 12)
        starts = [rng.randrange(len(whole)) for _ in range(1 if min_tokens else rng.randint(1, 4))]
        stop = tuple(whole[start : start + rng.randint(1, 5)] + rng.choice(["", "", "!"]) for start in starts)
        limits = {"min_tokens": min_tokens, "max_tokens": max_tokens}
        answer = submit(engine, str(index), [STARTS[name]], stop=stop, **limits)
        cases.append((answer, pieces, stop, limits))
    ends = set()
    for answer, pieces, stop, limits in cases:
        assert end_of(answer) == expected_end(pieces, stop, **limits), (stop, limits)
        check_streamed(answer, pieces, stop)
        ends.add((answer.finish_reason, len(answer.token_ids) == len(pieces)))
    assert {("stop", False), ("stop", True), ("length", False)} <= ends
    check_idle(engine)


# Half characters: tokens decoded one by one tear them apart (antonellof/ferrox#124, exo-explore/exo#1691)


@pytest.mark.parametrize("stop", [(), ("z😀",), ("😀",)])
@pytest.mark.parametrize("extra", [1, 2, 3])
def test_a_character_cut_by_the_limit_is_flushed_once(
    engine: EngineHost, scripted: Path, script_ids: dict[str, list[int]], extra: int, stop: tuple[str, ...]
) -> None:
    answer = submit(engine, "a", [STARTS["emoji"]], max_tokens=3 + extra, stop=stop)
    assert end_of(answer) == ("xyz\ufffd", 3 + extra, "length")
    assert "\ufffd" not in "".join(event.text for event in answer.events[:-1])
    assert answer.text == tokenizer_of(scripted).decode(answer.token_ids)
    assert answer.token_ids == script_ids["emoji"][: 3 + extra]


def test_a_character_cut_by_eos_is_flushed_once(engine: EngineHost) -> None:
    answer = submit(engine, "a", [STARTS["half"]])
    assert end_of(answer) == ("a\ufffd", 2, "stop")
    assert [event.text for event in answer.events] == ["a", "", "\ufffd"]


# Ids that may not come yet


def test_eos_as_the_first_token_gives_an_empty_output(engine: EngineHost, scripted: Path) -> None:
    assert end_of(submit(engine, "a", ids_of(scripted, "K"))) == ("", 0, "stop")


def test_before_min_tokens_the_second_best_takes_the_place_of_eos(engine: EngineHost) -> None:
    for temperature in (0.0, 1e-5, 1e-4):
        answer = submit(engine, "a", [STARTS["letters"]], min_tokens=13, temperature=temperature)
        assert end_of(answer) == ("ABCDEFGHIJKLMN", 14, "stop")


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_k": VOCAB + 10, "top_p": 1 - 1e-7}, {"top_p": 1e-9}])
def test_the_one_id_that_is_left_is_chosen_at_any_temperature(
    engine: EngineHost, temperature: float, filters: dict[str, Any]
) -> None:
    """All others may not come before min_tokens, the likeliest among them."""
    others = tuple(i for i in range(VOCAB) if i != NO_TEXT)
    sampling = {"temperature": temperature, "min_tokens": 5, "max_tokens": 5, **filters}
    answer = submit(engine, "a", [STARTS["letters"]], stop_token_ids=others, **sampling)
    assert answer.finish_reason == "length"
    assert answer.token_ids == [NO_TEXT] * 5


def test_a_flat_distribution_has_no_banned_id(engine: EngineHost) -> None:
    sampling = {"temperature": 1e6, "min_tokens": 8, "max_tokens": 8, "stop_token_ids": tuple(range(0, VOCAB, 2))}
    collected = [submit(engine, str(seed), [1], seed=seed, **sampling) for seed in range(30)]
    ids = [token_id for answer in collected if answer.last for token_id in answer.token_ids]
    assert len(ids) == 240
    assert all(token_id % 2 for token_id in ids)
    assert len(set(ids)) > 100, "nearly uniform over 256 ids"


def test_a_request_that_bans_every_id_is_refused(engine: EngineHost) -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds the whole vocabulary"):
        submit(engine, "a", [1], min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
