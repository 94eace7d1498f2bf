"""`PackedNumbers`: the column type of long lists of numbers, such as the tokens of a request and their times.

Bytes, and no JSON: a request has several numbers for each of its tokens, and to write them as text would hold the interpreter,
which the step loop needs, a hundred times as long. The first byte is a code of Python's `array` (`B`, `i` and `q`: integers of
1, 4 and 8 bytes, whichever the largest needs; `d`: floats), then the numbers follow in little-endian order.

A first byte of `[` begins JSON text: so runs of before this type are stored.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Sequence

from sqlalchemy import Dialect, LargeBinary
from sqlalchemy.types import TypeDecorator

_INTEGER_CODES = ("B", "i", "q")


class PackedNumbers(TypeDecorator[list[float] | list[int]]):
    """A list of integers, or one of floats; a float that is not finite comes back as None. None is SQL's NULL.

    Args:
        floats: of which kind the column is.
    """

    impl = LargeBinary
    cache_ok = True

    def __init__(self, floats: bool = False) -> None:
        super().__init__()
        self.floats = floats

    def process_bind_param(self, value: Sequence[float] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else pack(value, self.floats)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> list | None:
        return None if value is None else unpack(value)


def pack(numbers: Sequence[float], floats: bool) -> bytes:
    """Raises `OverflowError` for an integer that takes more than 8 bytes, `TypeError` for what is no number of the kind."""
    packed = array("d", numbers) if floats else _integers(numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.typecode.encode() + packed.tobytes()


def unpack(data: bytes) -> list:
    """The numbers that `pack`, or a program of before it, has written. Raises `ValueError` for anything else."""
    if data[:1] == b"[":
        return json.loads(data)
    numbers = array(data[:1].decode(), data[1:])
    if sys.byteorder == "big":
        numbers.byteswap()
    values = numbers.tolist()
    if numbers.typecode == "d" and not math.isfinite(sum(values)):
        return [value if math.isfinite(value) else None for value in values]
    return values


def _integers(numbers: Sequence[float]) -> array:
    for code in _INTEGER_CODES[:-1]:
        try:
            return array(code, numbers)  # type: ignore[arg-type]
        except OverflowError:
            continue
    return array(_INTEGER_CODES[-1], numbers)  # type: ignore[arg-type]
