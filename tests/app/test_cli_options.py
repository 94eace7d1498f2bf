from __future__ import annotations

import pytest

from app.cli_options import run_ids
from backend.errors import ServeLabError


def test_run_ids_may_carry_their_sign() -> None:
    assert run_ids(["12", "#7"]) == [12, 7]
    for name in ("", "#", "1.5", "-1", "١", "9" * 30):
        with pytest.raises(ServeLabError, match="run ids are numbers"):
            run_ids([name])
