"""Results that are kept beside the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load_results(benchmark: str, folder: Path) -> list[Mapping[str, Any]]:
    """Those of one benchmark in a folder of JSON files, by file name."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [document for document in documents if document.get("benchmark") == benchmark]
