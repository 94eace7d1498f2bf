from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import DatabaseError
from db.base import dump_json, plain_data
from db.models import RunRow
from db.repository import RunRepository
from db.session import Database
from tests.db.records import CONFIG, WORKLOAD

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),  # lone surrogates and control characters too
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(st.characters()), children, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def shared_repository() -> Iterator[RunRepository]:
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/runs.db")
        yield RunRepository(database)
        database.close()


@settings(max_examples=100, deadline=None)
@given(value=json_values)
def test_json_columns_give_back_what_was_put(shared_repository: RunRepository, value: Any) -> None:
    run_id = shared_repository.create(CONFIG, {"value": value})
    run = shared_repository.get(run_id)
    assert run is not None
    assert run.workload == {"value": value}
    assert repr(run.workload) == repr({"value": value}), "equal is not enough: 1 == 1.0 == True"


def test_plain_data_holds_only_what_json_can() -> None:
    value = {
        "nan": math.nan,
        "inf": [math.inf, -math.inf, 0.5],
        "numpy": (np.int64(3), np.float32(0.5), np.float64("nan")),
        "set": frozenset({7}),
        "path": Path("/models/x"),
        3: True,
    }
    expected = {
        "nan": None,
        "inf": [None, None, 0.5],
        "numpy": [3, 0.5, None],
        "set": [7],
        "path": "/models/x",
        "3": True,
    }
    plain = plain_data(value)
    assert plain == expected
    assert json.loads(dump_json(plain)) == expected
    assert [type(item) for item in plain["numpy"]] == [int, float, type(None)]


def test_text_keeps_what_utf8_can_hold_and_spells_out_the_rest(repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD, label="emoji 🙂, NUL \0, lone \ud83d surrogate")
    run = repository.get(run_id)
    assert run is not None
    assert run.label == "emoji 🙂, NUL \0, lone \\ud83d surrogate"


def test_times_come_back_aware_and_in_utc(database: Database, repository: RunRepository) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    in_tokyo = datetime(2026, 3, 1, 8, 30, tzinfo=timezone(timedelta(hours=9)))
    repository.record(run_id, {"started_at": in_tokyo}, {})
    run = repository.get(run_id)
    assert run is not None
    assert run.started_at is not None
    assert (run.started_at, run.started_at.tzinfo) == (in_tokyo, UTC)
    assert abs(datetime.now(UTC) - run.created_at) < timedelta(minutes=1)
    with pytest.raises(DatabaseError, match="no time zone"):
        repository.record(run_id, {"ended_at": datetime(2026, 3, 1)}, {})
    with database.read() as session:
        stored = session.get(RunRow, run_id)
        assert stored is not None
        assert stored.ended_at is None
