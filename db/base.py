"""The declarative base, and column types that keep foreign values out of the database."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Float, MetaData, Text
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

# Constraints need names that do not depend on the database: migrations alter them by name.
NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Base of every table."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored in UTC and given back in UTC. Refuses naive values."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class FiniteFloat(TypeDecorator[float]):
    """A float; NaN and infinities are stored as NULL, since they are no measurement."""

    impl = Float
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        return finite_or_none(value)


class ForeignText(TypeDecorator[str]):
    r"""Text from prompts, models and users; lone surrogates, which UTF-8 cannot hold, are stored as `\udXXX`."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.encode("utf-8", "backslashreplace").decode("utf-8")


class Json(TypeDecorator[Any]):
    """Plain nested data; see `plain_data` for what becomes of the rest. None is SQL's NULL."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return plain_data(value)


def finite_or_none(value: float | None) -> float | None:
    """`value` as a float, or None when it is None, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None


def plain_data(value: Any) -> Any:
    """What JSON can hold: non-finite floats become None, keys text, tuples and sets lists, numpy scalars numbers.

    Anything else becomes its `str`: a path or a version in a run's environment must not cost the run its row.
    """
    kind = type(value)
    if kind is float:  # most of what comes: a request has a number for each of its tokens
        return value if math.isfinite(value) else None
    if value is None or kind is int or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return finite_or_none(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain_data(item) for item in value]
    return str(value)


def dump_json(value: Any) -> str:
    """Compact JSON for a column. ASCII only: lone surrogates survive as escapes. Raises ValueError for NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
