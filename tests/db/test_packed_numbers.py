"""Lists of numbers as bytes: what goes in comes out, in as many bytes as the format says."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from db.packed_numbers import pack, unpack


@given(st.lists(st.integers(-(2**63), 2**63 - 1)) | st.lists(st.integers(0, 300)))
def test_integers_come_back(numbers: list[int]) -> None:
    assert unpack(pack(numbers, floats=False)) == numbers


@given(st.lists(st.floats()))
def test_floats_come_back_to_the_last_bit_and_what_is_none_as_null(numbers: list[float]) -> None:
    expected = [repr(number) if abs(number) < float("inf") else "None" for number in numbers]
    assert list(map(repr, unpack(pack(numbers, floats=True)))) == expected


def test_finite_numbers_with_a_sum_that_is_not_are_kept() -> None:
    assert unpack(pack([1.7e308, 1.7e308], floats=True)) == [1.7e308, 1.7e308]


def test_the_bytes_are_as_described() -> None:
    assert pack((), floats=False) == b"B"
    assert pack([0, 255], floats=False) == b"B" + struct.pack("<2B", 0, 255)
    assert pack([3, 256], floats=False) == b"i" + struct.pack("<2i", 3, 256)
    assert pack([-1], floats=False) == b"i" + struct.pack("<i", -1)
    assert pack([2**31, 1], floats=False) == b"q" + struct.pack("<2q", 2**31, 1)
    assert pack([0.5], floats=True) == b"d" + struct.pack("<d", 0.5)
    assert unpack(b"[1,null,2.5]") == [1, None, 2.5]


@pytest.mark.parametrize("data", [b"x1", b"i\0\0", b"[1", b"\xff"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(data)
