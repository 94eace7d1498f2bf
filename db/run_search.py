"""The condition of a search for runs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import or_

from db.models import RunRow
from db.run_ids import parse_run_id


def matches(text: str) -> Any:
    """Runs with `text` in label, notes or model, in any case, or with this id, as `12` or `#12`."""
    run_id = parse_run_id(text)
    if run_id is not None and text.startswith("#"):
        return RunRow.run_id == run_id
    by_id = [] if run_id is None else [RunRow.run_id == run_id]
    columns = (RunRow.label, RunRow.notes, RunRow.model)
    return or_(*by_id, *(column.icontains(text, autoescape=True) for column in columns))
