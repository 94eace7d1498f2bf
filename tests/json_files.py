"""Changing the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file, or remove those that are None."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data |= changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
