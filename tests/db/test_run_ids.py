from __future__ import annotations

import pytest

from db.run_ids import parse_run_id


def test_an_id_may_carry_its_sign_and_room_around_it() -> None:
    assert [parse_run_id(text) for text in ("12", "#12", " 12 ", "007", "9" * 18)] == [12, 12, 12, 7, 10**18 - 1]


@pytest.mark.parametrize("text", ["", "#", "##1", "# 1", "x", "-1", "+1", "1.5", "1_0", "²", "١", "9" * 19])
def test_what_is_no_id(text: str) -> None:
    assert parse_run_id(text) is None
