"""Texts of blocks for the map: sent only if asked for, what they say, and what is said where there are none."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update
from streamlit.testing.v1 import AppTest

from app.components import kv_cache_prompts, kv_cache_text
from app.components.kv_cache_text import MAX_CHARACTERS, visible
from db.models import RequestRow, RunRow
from tests.app.pages import page, words
from tests.app.prefix_runs import BLOCK_SIZE, add_prefix_run
from tests.app.stored_runs import FakeServices
from tests.app.test_kv_cache_page import drawn
from tests.metrics.prefix_traffic import WatchedLab


class Signs:
    """A tokenizer with a character for each id."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(chr(0x4E00 + it) for it in token_ids)


def texts(app: AppTest) -> tuple[dict[str, str], str | None, dict[str, Any], list[list[int]]]:
    header, lists, _ = drawn(app)
    return header["texts"]["lines"], header["texts"]["note"], header, lists


def ask(app: AppTest) -> None:
    app.checkbox(key="kv-show-text").check().run()
    assert not app.exception


def expected(lab: WatchedLab, header: dict[str, Any], lists: list[list[int]], line: Any) -> dict[str, str]:
    """`line` of the ids that each held block has."""
    found = {}
    for (place, _, _), blocks in zip(header["lists"], lists, strict=True):
        request, tokens = lab.asked[header["requests"][place]["id"]], header["requests"][place]["tokens"]
        for index, block in enumerate(blocks):
            ids = request.token_ids[index * BLOCK_SIZE : min(tokens, (index + 1) * BLOCK_SIZE)]
            if ids:
                found[str(block)] = line(ids, index * BLOCK_SIZE, request.num_prompt_tokens)
    return found


def test_no_text_is_sent_unless_somebody_asks(services: FakeServices) -> None:
    run_id, lab = add_prefix_run(services)
    app = page("kv_cache", run=str(run_id), step="20")
    assert "texts" not in drawn(app)[0]
    ask(app)
    lines, note, header, lists = texts(app)
    assert note is None
    ids = expected(
        lab, header, lists, lambda ids, *_: f"Token ids, which stand for no text: {', '.join(map(str, ids))}"
    )
    assert len(lines) > 10
    assert lines == ids
    app.checkbox(key="kv-show-text").uncheck().run()
    assert "texts" not in drawn(app)[0]


def test_texts_are_the_tokens_decoded_and_answers_may_be_missing(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_prompts, "_tokenizer", lambda model: Signs())
    run_id, lab = add_prefix_run(services)
    app = page("kv_cache", run=str(run_id), step="20")
    ask(app)
    lines, note, header, lists = texts(app)
    assert note is None
    assert lines == expected(lab, header, lists, lambda ids, *_: f"“{Signs().decode(ids, False)}”")
    with services.database.write() as session:
        session.execute(update(RequestRow).where(RequestRow.run_id == run_id).values(token_ids=None))

    def line(ids: list[int], begin: int, num_prompt_tokens: int) -> str:
        prompt = ids[: max(0, num_prompt_tokens - begin)]
        parts = [f"“{Signs().decode(prompt, False)}”"] * bool(prompt)
        return " ".join([*parts, *["Output text not stored."] * (len(prompt) < len(ids))])

    app = page("kv_cache", run=str(run_id), step="20")
    ask(app)
    lines, note, header, lists = texts(app)
    assert lines == expected(lab, header, lists, line)
    missing = [text for text in lines.values() if "not stored" in text]
    assert 0 < len(missing) < len(lines)


def test_without_a_tokenizer_or_its_prompts_it_says_so(services: FakeServices) -> None:
    run_id, _ = add_prefix_run(services)
    with services.database.write() as session:
        session.execute(update(RunRow).where(RunRow.run_id == run_id).values(model="/nowhere/gone"))
    app = page("kv_cache", run=str(run_id), step="20")
    ask(app)
    lines, note, *_ = texts(app)
    assert lines == {}
    assert note is not None
    assert "The tokenizer of /nowhere/gone is not here any more" in note
    assert note in words(app)
    changed, _ = add_prefix_run(services, digest="0" * 64)
    app = page("kv_cache", run=str(changed), step="20")
    ask(app)
    assert "The text of blocks cannot be told: the prompts drawn from the run's workload today" in (texts(app)[1] or "")


def test_a_step_sends_so_many_texts_at_most(services: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id, _ = add_prefix_run(services)
    monkeypatch.setattr(kv_cache_text, "MAX_BLOCKS", 3)
    app = page("kv_cache", run=str(run_id), step="20")
    ask(app)
    lines, note, *_ = texts(app)
    assert len(lines) == 3
    assert note is not None
    assert "The text of 3 blocks is sent with a step" in note


def test_text_is_short_and_white_space_can_be_seen() -> None:
    assert visible("a  b\n\tc") == "a··b↵⇥c"
    assert visible("é☕<b>") == "é☕<b>"
    assert visible("x\u202ey\x00") == "x\\u202ey\\u0000"
    long = visible("z" * 500)
    assert len(long) == MAX_CHARACTERS
    assert long.endswith("z…")
    assert visible("z" * MAX_CHARACTERS) == "z" * MAX_CHARACTERS
