"""What pages that look into a run's steps need of its record, checked before they build on it."""

from __future__ import annotations

from collections.abc import Mapping

from backend.errors import DatabaseError
from db.run_rows import Run

_NEEDED = {
    "cache.block_size": int,
    "cache.layout": str,
    "model.max_model_len": int,
    "scheduler.max_num_seqs": int,
}


def check_settings(run: Run) -> None:
    """Of a run that has settings as run. Raises `DatabaseError` naming the first that is not what the engine writes."""
    for name, kind in _NEEDED.items():
        section, _, key = name.partition(".")
        values = run.resolved_config.get(section) if isinstance(run.resolved_config, Mapping) else None
        value = values.get(key) if isinstance(values, Mapping) else None
        if not isinstance(value, kind) or (isinstance(value, int) and value < 1):
            raise DatabaseError(f"its stored settings are damaged: {name} is not there")


def num_blocks_of(run: Run) -> int:
    """Usable blocks of its pool, as its record of the load says. Raises as `check_settings`."""
    load = run.load if isinstance(run.load, Mapping) else {}
    value = load.get("num_blocks")
    if not isinstance(value, int) or value < 1 or not isinstance(load.get("model", {}), Mapping):
        raise DatabaseError("its stored record of the load is damaged: num_blocks or the model is not there")
    return value
